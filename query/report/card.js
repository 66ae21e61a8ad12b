// The card of one head.

const NUMBERS = [
  "closure", "alpha", "capacity", "attainment", "refined_capacity", "trace_rank", "rank", "norm", "trace", "sigma_max",
  "sigma_min", "condition", "participation", "stable_rank", "isometry", "cos_max", "cos_mean", "cos_min",
  "spectral_radius", "copying", "null_scale",
];
const NULL_NUMBERS = [
  "n_draws", "null_seed", "null_median", "null_q95", "null_q99", "p", "p_tail", "tail_trusted", "q", "wins",
  "mismatches", "mismatch_median", "mismatch_p",
];
const LEVELS = [
  ["null_median", "null median"], ["null_q95", "null 95%"], ["null_q99", "null 99%"],
  ["mismatch_median", "mismatch median"], ["closure", "this head"], ["capacity", "capacity"],
  ["refined_capacity", "refined capacity"],
];
const TITLES = {
  n_draws: "scrambles", null_seed: "seed", null_median: "median", null_q95: "95% quantile", null_q99: "99% quantile",
  p_tail: "p from the tail", tail_trusted: "tail trusted", wins: "above median",
};
const worded = (name) => TITLES[name] ?? name.replaceAll("_", " ");

function ledger(i, names) {
  const list = element("dl", { class: "ledger" });
  for (const name of names) {
    if (!(name in columns) || columns[name][i] === null) continue;
    const term = element("dt", { title: about.meanings[name] ?? null }, worded(name));
    const value = name.endsWith("seed") ? String(columns[name][i]) : formatted(columns[name][i]);
    list.append(element("div", {}, term, element("dd", { "data-column": name }, value)));
  }
  return list;
}

function bar(value) {
  const cell = element("td", {}, formatted(value, 3));
  if (value > 0) {
    cell.className = "bar";
    cell.style.setProperty("--share", `${100 * Math.min(1, value)}%`);
  }
  return cell;
}

async function pairTable(i) {
  const others = await pairsOf(i);
  if (!others.length) return element("p", { class: "note" }, "The layer has no other head.");
  const body = element("tbody");
  for (const other of others.sort((a, b) => b.shared - a.shared || a.i - b.i)) {
    const link = element("button", { type: "button", class: "link", onclick: () => choose(other.i) }, `H${columns.head[other.i]}`);
    body.append(element("tr", {}, element("th", { scope: "row" }, link), element("td", {}, other.shared ? "shared" : ""),
      other.shared ? element("td", {}, "–") : bar(other.mismatch), bar(other.right), bar(other.left)));
  }
  const heading = (text, title) => element("th", { scope: "col", title }, text);
  const head = element("thead", {}, element("tr", {},
    heading("other", "the other head j of the layer"), heading("values", "whether both heads share one value projection"),
    heading("mismatch", "closure of this head's O with the other's V"),
    heading("right", "T_j T ~ alpha T_j: this head acts on j from the right"),
    heading("left", "T_j T ~ alpha T: the control")));
  return element("div", { class: "scroll short", tabindex: 0, role: "region", "aria-label": "Pairs of the layer" },
    element("table", { id: "pairs" }, head, body));
}

async function showCard(i) {
  const part = about.parts[partOf[i]];
  const body = byId("card-body");
  byId("card-title").textContent = columns.label[i];
  byId("card-part").textContent = `${part.model}, ${part.operator} operator, ${part.stack}; value head ${columns.kv_head[i]}, ` +
    `d_model ${columns.d_model[i]}, d_head ${columns.d_head[i]}`;
  for (const place of ["levels", "sigma", "cosine", "eigenvalue"]) {
    drawn.get(place)?.result?.finalize();
    if (drawn.has(place)) drawn.get(place).result = null;
  }
  const chart = (id, label) => element("figure", {}, element("div", { id, class: "chart", role: "img", "aria-label": label }));
  const own = ledger(i, [...NUMBERS, ...about.extra]);
  const null_ = ledger(i, NULL_NUMBERS);
  const pairs = element("div");
  const undefined_ = columns.reason[i] && element("p", { class: "warning" }, `Closure is undefined: ${columns.reason[i]}.`);
  const apart = columns.neutralised[i] && element("p", { class: "note" }, `T leaves out: ${columns.neutralised[i]}.`);
  body.replaceChildren(...[
    undefined_, apart, own,
    element("h3", {}, "Closure beside its null and capacity"), chart("levels", "Closure, null, mismatch and capacity"),
    null_.children.length ? null_ : element("p", { class: "note" }, "No null is stored."),
    element("h3", {}, "Spectra"),
    element("div", { class: "pair" }, chart("sigma", "Singular values"), chart("cosine", "Principal cosines")),
    chart("eigenvalue", "Eigenvalues in the complex plane"),
    element("p", { class: "note" }, "Cross: alpha. If T² = αT, every eigenvalue is 0 or α."),
    element("h3", {}, "Pairs of the layer"), pairs,
    element("p", { class: "note" }, "T is this head, j the other. Mismatch: closure of O V", element("sub", {}, "j"), "ᵀ. Right: T",
      element("sub", {}, "j"), " T ≈ α T", element("sub", {}, "j"), ". Left, the control: T", element("sub", {}, "j"), " T ≈ α T."),
  ].filter(Boolean));
  byId("card").hidden = false;
  document.body.classList.add("with-card");
  const levels = LEVELS.filter(([name]) => columns[name]?.[i] > 0)
    .map(([name, title]) => ({ name: title, value: columns[name][i], own: name === "closure" }));
  const [table] = await Promise.all([pairTable(i), draw("levels", about.charts.levels, levels, { height: 18 * levels.length }), drawSpectra(i)]);
  pairs.replaceChildren(table);
}
