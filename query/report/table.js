// The table of heads: sorted, filtered, a slice at a time.

const SLICE = 100;
const SHOWN_COLUMNS = [
  "label", "closure", "alpha", "capacity", "attainment", "null_median", "p", "q", "trace_rank", "norm", "participation",
  "cos_mean", "copying", ...about.extra,
].filter((name) => name === "label" || about.filled.includes(name));
const HEADINGS = { label: "head", null_median: "null median" };
const sorting = { column: "closure", descending: true };
const searchable = columns.label.map((label, i) => {
  const part = about.parts[partOf[i]];
  return [part.model, part.operator, part.stack, label, columns.status[i], columns.reason[i] ?? ""].join(" ").toLowerCase();
});
let visible = SLICE;

function wholeWord(text, word) {
  for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + 1)) {
    const after = text[at + word.length];
    if (!/\d$/.test(word) || !/\d/.test(after ?? "")) return true;
  }
  return false;
}

function matching() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const least = byId("from").value === "" ? null : Number(byId("from").value);
  const part = about.parts[state.part];
  const everywhere = byId("scope").value === "all";
  const [start, end] = everywhere ? [0, headCount] : [part.start, part.start + part.count];
  const found = [];
  for (let i = start; i < end; i++) {
    if (least !== null && !(columns.closure[i] !== null && columns.closure[i] >= least)) continue;
    if (partOf[i] === state.part && !withinBrush(i)) continue;
    if (words.every((word) => wholeWord(searchable[i], word))) found.push(i);
  }
  const values = columns[sorting.column];
  const position = (i) => i;
  const sign = sorting.descending ? -1 : 1;
  const key = sorting.column === "label" ? position : (i) => values[i];
  return found.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return sign * (x - y) || a - b;
  });
}

function heading(name) {
  const sorted = name === sorting.column ? (sorting.descending ? "descending" : "ascending") : "none";
  const button = element("button", { type: "button", title: about.meanings[name] ?? null, onclick: () => sortBy(name) },
    HEADINGS[name] ?? worded(name));
  return element("th", { scope: "col", "aria-sort": sorted, "data-column": name, class: name === "label" ? "name" : null }, button);
}

function sortBy(name) {
  sorting.descending = name === sorting.column ? !sorting.descending : name !== "label" && !["p", "q"].includes(name);
  sorting.column = name;
  fillTable();
  byId("heads").querySelector(`th[data-column="${CSS.escape(name)}"] button`).focus();
}

function fillTable(keep = false) {
  if (!keep) visible = SLICE;
  const everywhere = byId("scope").value === "all";
  const found = matching();
  const rows = found.slice(0, visible).map((i) => {
    const open = element("button", { type: "button", class: "link" }, columns.label[i]);
    const row = element("tr", { "data-head": i, class: i === state.chosen ? "chosen" : null }, element("th", { scope: "row", class: "name" }, open));
    if (everywhere) row.append(element("td", { class: "name" }, partName(about.parts[partOf[i]])));
    for (const name of SHOWN_COLUMNS.slice(1)) row.append(element("td", {}, formatted(columns[name][i])));
    return row;
  });
  const headings = SHOWN_COLUMNS.map(heading);
  if (everywhere) headings.splice(1, 0, element("th", { scope: "col", class: "name" }, "model"));
  byId("heads").tHead.replaceChildren(element("tr", {}, ...headings));
  byId("heads").tBodies[0].replaceChildren(...rows);
  byId("found").textContent = `${found.length.toLocaleString("en")} ${found.length === 1 ? "head" : "heads"}` +
    (state.brush ? " in the rectangle" : "");
  byId("more").hidden = found.length <= visible;
  byId("more").textContent = `Show ${Math.min(SLICE, found.length - visible)} more`;
}

byId("heads").addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-head]");
  if (row) choose(Number(row.dataset.head));
});
byId("heads").addEventListener("mouseover", (event) => {
  const row = event.target.closest("tr[data-head]");
  hover(row ? Number(row.dataset.head) : -1);
});
byId("heads").addEventListener("mouseleave", () => hover(-1));
byId("more").addEventListener("click", () => {
  visible += SLICE;
  fillTable(true);
});
