// Everything the page knows: facts, heads column by column, and packed arrays of each part.

const byId = (id) => document.getElementById(id);

function fail({ message, reason }) {
  byId("failure").hidden = false;
  byId("failure").textContent = `This browser cannot show the heads: ${message ?? reason?.message ?? reason}`;
}

addEventListener("error", fail);
addEventListener("unhandledrejection", fail);

const about = JSON.parse(byId("about").textContent);
const SPECTRA = ["sigma", "cosine", "re", "im"];
const PAIRS = ["mismatch", "right", "left"];

async function inflated(id) {
  const text = atob(byId(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const columns = JSON.parse(new TextDecoder().decode(await inflated("data-heads")));
const headCount = columns.label.length;
const partOf = new Uint16Array(headCount);
about.parts.forEach((part, index) => partOf.fill(index, part.start, part.start + part.count));

const several = (name) => new Set(about.parts.map((part) => part[name])).size > 1;
const operators = several("operator");
const stacks = several("stack");

function partName(part) {
  return [part.model, operators && part.operator, stacks && part.stack].filter(Boolean).join(", ");
}

const address = (i) => {
  const part = about.parts[partOf[i]];
  return "#" + [part.model, part.operator, part.stack, columns.label[i]].map(encodeURIComponent).join("/");
};
const addresses = new Map(columns.label.map((_, i) => [address(i), i]));

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

const unpacked = new Map();

// Arrays of a part by name: the order and the scale are those that _packed in contents.py gives them.
function arraysOf(index) {
  if (!unpacked.has(index)) {
    unpacked.set(index, inflated(`data-${index}`).then((buffer) => {
      const bytes = new Uint8Array(buffer);
      const count = bytes.length / 2;
      const { layers, heads, d_head: size } = about.parts[index];
      const values = new Float32Array(count);
      for (let i = 0; i < count; i++) values[i] = half(bytes[i] | (bytes[count + i] << 8));
      const arrays = {};
      let start = 0;
      for (const [names, last] of [[SPECTRA, size], [PAIRS, heads]]) {
        for (const name of names) {
          arrays[name] = values.subarray(start, (start += layers.length * heads * last));
        }
      }
      return arrays;
    }));
  }
  return unpacked.get(index);
}

async function spectraOf(i) {
  const part = about.parts[partOf[i]];
  const arrays = await arraysOf(partOf[i]);
  const row = part.layers.indexOf(columns.layer[i]) * part.heads + columns.head[i];
  const scale = columns.sigma_max[i] || 1;
  const own = (name) => Array.from(arrays[name].subarray(row * part.d_head, row * part.d_head + columns.d_head[i]));
  return {
    sigma: own("sigma").map((value) => value * scale),
    cosine: own("cosine"),
    re: own("re").map((value) => value * scale),
    im: own("im").map((value) => value * scale),
  };
}

// The other heads of the layer: mismatch is O of this head with V of the other; right and left are
// of the product T_other T_this, in which this head acts.
async function pairsOf(i) {
  const part = about.parts[partOf[i]];
  const arrays = await arraysOf(partOf[i]);
  const layer = part.layers.indexOf(columns.layer[i]);
  const at = (name, write, read) => arrays[name][(layer * part.heads + write) * part.heads + read] ** 2;
  const others = [];
  for (let j = part.start; j < part.start + part.count; j++) {
    if (j === i || columns.layer[j] !== columns.layer[i]) continue;
    const [own, other] = [columns.head[i], columns.head[j]];
    others.push({
      i: j,
      shared: columns.kv_head[i] === columns.kv_head[j],
      mismatch: at("mismatch", own, other),
      right: at("right", other, own),
      left: at("left", other, own),
    });
  }
  return others;
}

const superscript = (digits) => digits.replace("-", "⁻").replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);

function formatted(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size > 0 && size < 1e-300) return "< 10⁻³⁰⁰";
  if (size >= 1e-4 && size < 1e6) return String(Number(value.toPrecision(digits))).replace("-", "−");
  const [fraction, power] = value.toExponential(digits - 1).split("e");
  return `${String(Number(fraction)).replace("-", "−")} × 10${superscript(power.replace("+", ""))}`;
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
