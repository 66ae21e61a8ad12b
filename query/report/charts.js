// Charts: a specification from the program, rows and parameters from here.

const drawn = new Map();

function theme() {
  const style = getComputedStyle(document.documentElement);
  const [text, quiet, line, ground] = ["--text", "--quiet", "--line", "--ground"].map((name) => style.getPropertyValue(name).trim());
  const font = "system-ui, sans-serif";
  return {
    background: null,
    font,
    view: { stroke: null },
    axis: {
      labelColor: quiet, titleColor: text, titleFontWeight: 500, titleFontSize: 12, labelFontSize: 11,
      domainColor: line, tickColor: line, gridColor: line, gridOpacity: 0.6,
    },
    axisX: { grid: false },
    legend: { labelColor: quiet, titleColor: text, titleFontWeight: 500, titleFontSize: 12, labelFontSize: 11 },
    rect: { stroke: ground, strokeWidth: 1 },
    text: { color: text },
  };
}

async function draw(place, specification, rows, { height, parameters = {} } = {}) {
  if (!rows.length) {
    blank(place, "Not defined for this head.");
    return null;
  }
  const turn = (drawn.get(place)?.turn ?? 0) + 1;
  drawn.set(place, { ...drawn.get(place), turn });
  const { $schema, config, ...spec } = specification;
  const params = (list) => list?.map((item) => (item.name in parameters ? { ...item, value: parameters[item.name] } : item));
  const full = {
    ...spec,
    ...(height && { height }),
    params: params(spec.params),
    datasets: { ...spec.datasets, rows },
  };
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const node = element("div", { class: "vega" });
  const kept = byId(place);
  node.style.width = "100%";
  kept.append(node);
  const result = await vegaEmbed(node, full, {
    mode: "vega-lite",
    ast: true,
    renderer: "canvas",
    config: theme(),
    tooltip: { theme: dark ? "dark" : "light" },
    actions: false,
  });
  if (drawn.get(place).turn !== turn) {
    result.finalize();
    node.remove();
    return null;
  }
  drawn.get(place).result?.finalize();
  for (const old of kept.querySelectorAll(":scope > .vega")) if (old !== node) old.remove();
  drawn.get(place).result = result;
  return result.view;
}

function blank(place, text) {
  const kept = byId(place);
  const before = drawn.get(place);
  before?.result?.finalize();
  drawn.set(place, { turn: (before?.turn ?? 0) + 1 });
  kept.replaceChildren(element("p", { class: "note vega" }, text));
}

function signal(place, name, value) {
  const view = drawn.get(place)?.result?.view;
  if (view) view.signal(name, value).runAsync();
}

async function drawSpectra(i) {
  const { sigma, cosine, re, im } = await spectraOf(i);
  const indexed = (values) => values.map((value, index) => ({ index: index + 1, value })).filter((row) => row.value === row.value);
  const eigenvalues = re.map((value, k) => ({ re: value, im: im[k], alpha: false })).filter((row) => row.re === row.re);
  if (columns.alpha[i] !== null) eigenvalues.push({ re: columns.alpha[i], im: 0, alpha: true });
  await Promise.all([
    draw("sigma", about.charts.sigma, indexed(sigma)),
    draw("cosine", about.charts.cosine, indexed(cosine)),
    draw("eigenvalue", about.charts.eigenvalue, eigenvalues, {
      parameters: { radius: 1.08 * Math.max(...eigenvalues.map((row) => Math.hypot(row.re, row.im)), 1e-300) },
    }),
  ]);
}
