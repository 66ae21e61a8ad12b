// What is chosen, and how the views follow it.

const state = { part: 0, hovered: -1, last: -1, chosen: -1, brush: null };
let opener = null;

function withinBrush(i) {
  if (!state.brush) return true;
  return Object.entries(state.brush).every(([name, [low, high]]) => {
    const value = columns[name][i];
    return value !== null && value >= Math.min(low, high) && value <= Math.max(low, high);
  });
}

function rowsOf(index) {
  const { start, count } = about.parts[index];
  const names = ["label", "layer", "head", ...about.charts.shown.map(([name]) => name)];
  return Array.from({ length: count }, (_, k) => {
    const row = { i: start + k };
    for (const name of names) row[name] = columns[name][start + k];
    return row;
  });
}

function describe(i) {
  const shown = about.charts.shown.filter(([name]) => columns[name][i] !== null).slice(0, 3);
  return `${columns.label[i]}: ${shown.map(([name, title]) => `${title} ${formatted(columns[name][i])}`).join(", ")}`;
}

function hover(i) {
  if (i === state.hovered) return;
  state.hovered = i;
  if (i >= 0) state.last = i;
  const here = i >= 0 && partOf[i] === state.part ? i : -1;
  for (const place of ["heatmap", "scatter"]) signal(place, "hovered", here);
  for (const row of byId("heads").querySelectorAll("tr.hovered")) row.classList.remove("hovered");
  if (i >= 0) byId("heads").querySelector(`tr[data-head="${i}"]`)?.classList.add("hovered");
}

function listen(view) {
  const headOf = (item) => (Number.isInteger(item?.datum?.i) ? item.datum.i : -1);
  view.addEventListener("mouseover", (_, item) => hover(headOf(item)));
  view.addEventListener("mouseout", () => hover(-1));
  view.addEventListener("click", (_, item) => headOf(item) >= 0 && choose(headOf(item)));
}

function heatmapHeight() {
  const { length } = about.parts[state.part].layers;
  return length * Math.max(9, Math.min(22, Math.round(400 / length)));
}

async function drawHeatmap() {
  const name = byId("heatmap-column").value;
  const rows = rowsOf(state.part);
  const logarithmic = name === "closure" && byId("log").checked && rows.some((row) => row.closure > 0);
  byId("heatmap-meaning").textContent = `${worded(name)}: ${about.meanings[name] ?? "a statistic of your own"}`;
  if (name !== "closure" && rows.every((row) => row[name] === null)) {
    blank("heatmap", `No head here has ${worded(name)}.`);
    return;
  }
  const view = await draw("heatmap", about.charts.heatmap[logarithmic ? "closure log" : name], rows, {
    height: heatmapHeight(),
    parameters: {
      hovered: -1, chosen: state.chosen, marked: state.brush ?? {}, marked_column: byId("scatter-column").value,
    },
  });
  if (view) listen(view);
}

async function drawScatter() {
  const name = byId("scatter-column").value;
  if (!name) return;
  const scale = byId("log").checked ? "log" : "linear";
  const rows = rowsOf(state.part);
  if (!rows.some((row) => row[name] !== null && (scale === "log" ? row.closure > 0 : row.closure !== null))) {
    blank("scatter", `No head here has both closure and ${worded(name)}.`);
    return;
  }
  const view = await draw("scatter", about.charts.scatter[`${name} ${scale}`], rows, {
    height: Math.max(280, Math.min(440, heatmapHeight())),
    parameters: { hovered: -1, chosen: state.chosen },
  });
  if (!view) return;
  listen(view);
  view.addSignalListener("brush", (_, brush) => {
    state.brush = Object.keys(brush).length ? brush : null;
    signal("heatmap", "marked", state.brush ?? {});
    fillTable();
  });
}

async function redraw() {
  state.brush = null;
  fillTable();
  await Promise.all([drawHeatmap(), drawScatter()]);
}

async function showPart(index) {
  state.part = index;
  byId("part").value = index;
  for (const link of document.querySelectorAll("#summary a")) {
    link.closest("tr").classList.toggle("chosen", Number(link.dataset.part) === index);
  }
  await redraw();
}

async function choose(i) {
  if (byId("card").hidden) opener = document.activeElement;
  state.chosen = i;
  history.replaceState(null, "", address(i));
  if (partOf[i] !== state.part) await showPart(partOf[i]);
  for (const place of ["heatmap", "scatter"]) signal(place, "chosen", i);
  for (const row of byId("heads").querySelectorAll("tr[data-head]")) row.classList.toggle("chosen", Number(row.dataset.head) === i);
  document.querySelector("main").inert = matchMedia("(max-width: 40rem)").matches;
  byId("status").textContent = `Card open: ${describe(i)}`;
  await showCard(i);
  byId("card").scrollTop = 0;
  byId("card-title").focus({ preventScroll: true });
  window.dispatchEvent(new Event("resize"));
}

function closeCard() {
  byId("card").hidden = true;
  document.querySelector("main").inert = false;
  document.body.classList.remove("with-card");
  state.chosen = -1;
  for (const place of ["heatmap", "scatter"]) signal(place, "chosen", -1);
  for (const row of byId("heads").querySelectorAll("tr.chosen")) row.classList.remove("chosen");
  history.replaceState(null, "", "#explore");
  byId("status").textContent = "";
  window.dispatchEvent(new Event("resize"));
  if (opener?.isConnected) opener.focus({ preventScroll: true });
}

function step(by) {
  const { start, count } = about.parts[partOf[state.chosen]];
  choose(start + ((state.chosen - start + by + count) % count));
}

function move(event) {
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const part = about.parts[state.part];
  const at = state.last >= 0 && partOf[state.last] === state.part ? state.last : -1;
  if (event.key === "Enter" && at >= 0) choose(at);
  if (!(event.key in moves)) return;
  event.preventDefault();
  const [down, right] = moves[event.key];
  const layer = at < 0 ? 0 : part.layers.indexOf(columns.layer[at]) + down;
  const head = at < 0 ? 0 : columns.head[at] + right;
  for (let i = part.start; i < part.start + part.count; i++) {
    if (columns.layer[i] === part.layers[layer] && columns.head[i] === head) {
      hover(i);
      byId("status").textContent = describe(i);
    }
  }
}

function fromAddress() {
  const i = addresses.get(location.hash);
  if (i !== undefined && i !== state.chosen) choose(i);
}

byId("part").append(...about.parts.map((part, index) => element("option", { value: index }, partName(part))));
byId("heatmap-column").append(...about.charts.shown.map(([name, title]) => element("option", { value: name }, title)));
byId("scatter-column").append(...about.charts.shown.filter(([name]) => name !== "closure")
  .map(([name, title]) => element("option", { value: name }, title)));
byId("scatter-column").value = ["capacity", "null_median"].find((name) => about.filled.includes(name)) ?? byId("scatter-column").value;
byId("scope").closest("label").hidden = about.parts.length === 1;

byId("part").addEventListener("change", (event) => showPart(Number(event.target.value)));
byId("heatmap-column").addEventListener("change", drawHeatmap);
byId("scatter-column").addEventListener("change", redraw);
byId("log").addEventListener("change", redraw);
for (const id of ["filter", "from", "scope"]) byId(id).addEventListener("input", () => fillTable());
for (const id of ["controls", "filters"]) byId(id).addEventListener("submit", (event) => event.preventDefault());
for (const link of document.querySelectorAll("#summary a")) {
  link.addEventListener("click", () => showPart(Number(link.dataset.part)));
}
byId("close").addEventListener("click", closeCard);
byId("previous").addEventListener("click", () => step(-1));
byId("next").addEventListener("click", () => step(1));
byId("heatmap").addEventListener("keydown", move);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("card").hidden) closeCard();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", async () => {
  const { chosen } = state;
  await redraw();
  if (chosen >= 0) choose(chosen);
});
window.addEventListener("hashchange", fromAddress);

byId("log").checked = columns.closure.every((value) => value < 0.1);

await showPart(0);
fromAddress();
document.documentElement.dataset.ready = "true";
