// What every view uses. What a model wrote reaches the page as text nodes only, never as markup.
const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const report = { runs: [], chosen: 0, view: "", blocks: new Map() };
const views = {};

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return node;
}

async function bytesOf(id) {
  const text = document.getElementById(id).textContent;
  const packed = Uint8Array.fromBase64
    ? Uint8Array.fromBase64(text)
    : Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function readFacts() {
  return JSON.parse(new TextDecoder().decode(await bytesOf("facts")));
}

// The arrays of one block, by name; read once. They are stored plane by plane: all lowest bytes first.
async function arraysOf(name, number = report.chosen) {
  const id = `${name}-${number}`;
  if (report.blocks.has(id)) return report.blocks.get(id);

  const bytes = await bytesOf(id);
  const arrays = {};
  let start = 0;
  for (const [column, type, length] of report.runs[number].layouts[name]) {
    const array = new TYPES[type](length);
    const size = array.BYTES_PER_ELEMENT;
    const target = new Uint8Array(array.buffer);
    for (let plane = 0; plane < size; plane++) {
      const from = start + plane * length;
      for (let i = 0; i < length; i++) target[i * size + plane] = bytes[from + i];
    }
    start += length * size;
    arrays[column] = array;
  }
  report.blocks.set(id, arrays);
  return arrays;
}

const present = (value) => value !== null && value !== undefined && Number.isFinite(value);
const fixed = (value, digits) => value.toFixed(digits).replace(/^-(?=[0.]+$)/, ""); // no -0.0
const percent = (share) => (present(share) ? `${fixed(100 * share, 1)}\u00a0%` : "–");
const whole = (value) => (present(value) ? (Math.round(value) + 0).toLocaleString("en") : "–");

function short(value) {
  if (!present(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return whole(value);
  return size !== 0 && size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

function clock(seconds) {
  if (!present(seconds)) return "–";
  if (seconds < 1) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (seconds < 90) return `${Number(seconds.toPrecision(4))} s`;
  const minutes = Math.floor(seconds / 60);
  const rest = String(Math.round(seconds % 60)).padStart(2, "0");
  return minutes < 90 ? `${minutes}:${rest} min` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
}

function table(head, rows, caption) {
  const number = (cell) => /^[-–\d.,…% \u00a0:±×e]+( (ms|s|min|h|tokens|of \d+))?$/.test(cell);
  const cells = (tag, row) => el("tr", {}, row.map((cell) => (cell instanceof Node ? el(tag, {}, cell) : el(tag, { class: number(cell) ? "number" : undefined }, String(cell)))));
  const body = el("tbody", {}, rows.map((row) => cells("td", row)));
  return el("div", { class: "scroll" }, el("table", {}, caption ? el("caption", {}, caption) : null, el("thead", {}, cells("th", head)), body));
}

function panel(title, ...content) {
  return el("section", { class: "panel" }, el("h2", {}, title), content);
}

function choice(label, options, chosen, change) {
  const list = el("select", { change: (event) => change(event.target.value) });
  for (const [value, text] of options) list.append(el("option", { value, selected: value === chosen }, text));
  return el("label", {}, `${label} `, list);
}

// One entry of a legend, with the colour of that name.
function key(text, tint, shape = "") {
  const entry = el("span", { class: `key ${shape}` }, text);
  entry.style.setProperty("--tint", `var(--${tint})`);
  return entry;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
