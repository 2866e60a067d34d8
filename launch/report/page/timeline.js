// The run in lanes. uPlot draws axes and keeps the window; the bars of a million events are one picture, a pixel line for
// each row: what is shorter than a pixel adds to its pixel's shade.
const TINTS = {
  trained: "good", evaluated: "c10", stale: "c3", redundant: "c4", filtered: "c5", settled: "c7", failed: "bad", open: "dim",
  reset: "c6", generate: "c8", step: "c2", prefill: "c13", decode: "c1", load: "c11",
  prepare: "c12", train: "c14", publish: "c15", save: "c16", export: "c9",
};
const KIND_NAMES = { reset: "reset", generate: "generation", step: "environment's step", prefill: "first token", decode: "further tokens", load: "weights are loaded", prepare: "prepare", train: "train", publish: "publish" };
const NOT_OF_TICKETS = new Set(["load", "prepare", "train", "publish", "save", "export"]);
const nameOfTint = (kind) => (kind.startsWith("wait") ? "busy" : TINTS[kind] || "dim");
const tintOf = (kind) => colour(nameOfTint(kind));
const MARK_NAMES = { weights: "weights are published", death: "death", restart: "restart", alarm: "alarm", end: "the run ends" };
const MARKS = { weights: "dim", death: "bad", restart: "good", alarm: "warn", end: "ink" };
const SHADES = 31;
const LINES = 4; // of the picture, for each row: the last one shows the end of the episode

views.timeline = async (main, run) => {
  const facts = run.timeline;
  if (!facts.lanes || !facts.lanes.length) {
    main.append(el("p", { class: "hint" }, "No trace was kept: tracking.trace=full records every process of a run."));
    return;
  }
  const arrays = await arraysOf("timeline");
  if (!main.isConnected) return;

  const layers = ["episodes", "parts"].map((name) => layer(arrays, name));
  const rows = facts.lanes.reduce((sum, lane) => sum + lane.rows, 0);
  const rowHeight = Math.max(2, Math.min(16, Math.floor(1000 / rows)));
  const says = el("p", { class: "hint inspect" }, "point at a bar; drag to move, wheel or pinch to zoom, double click for all");
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, click: act }, text);
  const place = el("div", { class: "chart lanes" });
  const left = facts.leftOut ? ` · the ${whole(facts.leftOut)} shortest bars are left out` : "";
  main.append(
    el("div", { class: "controls" }, button("−", "zoom out", () => zoom(2)), button("+", "zoom in", () => zoom(0.5)), button("all", "whole timeline", () => everything()),
      el("span", { class: "hint" }, `${whole(facts.events)} events in ${clock(facts.seconds)}${left}`)),
    legend(facts, layers), markLegend(facts), says, el("div", { class: "panel" }, place));

  const bounds = [];
  let [first, top] = [0, 0]; // the lane's first row, and its pixels from the top
  for (const { name, rows: count } of facts.lanes) {
    const height = Math.max(18, count * rowHeight);
    bounds.push({ name, first, count, top, height });
    first += count;
    top += height;
  }

  const painter = paintLanes(facts, layers, rows);
  const chart = mount(place, {
    height: top + 60,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, points: { show: false } },
    scales: { x: { time: false, range: (_, low, high) => [low, high] }, y: { range: [0, top], dir: -1 } },
    series: [{}, { show: true, paths: () => null, points: { show: false } }],
    axes: [
      axis("seconds since the start", { size: 30 }),
      axis("", { size: innerWidth < 720 ? 30 : 92, splits: () => bounds.map((lane) => lane.top + lane.height / 2), values: () => bounds.map((lane) => (innerWidth < 720 ? lane.name.replace(/^(.)[a-z_]*\./, "$1") : lane.name)), grid: { show: false }, ticks: { show: false } }),
    ],
    hooks: { draw: [(u) => painter(u, bounds)] },
  }, [[Math.max(0, facts.first - 0.02 * (facts.seconds - facts.first)), facts.seconds], [null, null]]);

  const set = (min, max) => {
    const span = Math.min(facts.seconds, Math.max(facts.tick * 20, max - min));
    const begin = Math.min(Math.max(0, min), facts.seconds - span);
    chart.setScale("x", { min: begin, max: begin + span });
  };
  const zoom = (factor, at = 0.5) => {
    const { min, max } = chart.scales.x;
    const centre = min + at * (max - min);
    set(centre - (centre - min) * factor, centre + (max - centre) * factor);
  };
  const pan = (share) => {
    const { min, max } = chart.scales.x;
    set(min + share * (max - min), max + share * (max - min));
  };
  const everything = () => set(0, facts.seconds);

  views.timeline.key = (event) => {
    const acts = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => zoom(0.5), ArrowDown: () => zoom(2), "+": () => zoom(0.5), "-": () => zoom(2), 0: everything };
    if (acts[event.key]) acts[event.key]();
  };
  Object.assign(views.timeline, { zoom, bounds });
  gestures(chart, zoom, pan, everything);
  chart.over.addEventListener("mousemove", (event) => {
    const bar = barAt(chart, layers, bounds, event);
    says.textContent = bar ? barText(bar) : nearMark(chart, facts, event) || " ";
  });
  chart.over.addEventListener("click", (event) => {
    const bar = barAt(chart, layers, bounds, event);
    if (!bar) return;
    says.textContent = barText(bar);
    const kept = bar.isTicket && run.samples.episodes.find((episode) => episode.ticket_id % 2 ** 32 === bar.ref);
    if (kept) says.append(" ", el("button", { type: "button", click: () => {
      lookup.chosen = kept;
      lookup.filters = {};
      show("samples");
    } }, "read it"));
  });
};

// Begins are stored as distances within a row.
function layer(arrays, name) {
  const of = (column) => arrays[`${name}.${column}`];
  const found = { begin: of("begin"), length: of("length"), kind: of("kind"), ref: of("ref"), rows: of("rows") };
  if (!arrays[`${name}.decoded`]) {
    for (let row = 0; row + 1 < found.rows.length; row++) {
      for (let i = found.rows[row] + 1; i < found.rows[row + 1]; i++) found.begin[i] += found.begin[i - 1];
    }
    arrays[`${name}.decoded`] = true;
  }
  return found;
}

// The kinds that occur, in the order of the run's own list; all waits are one.
function legend(facts, layers) {
  const entries = layers.map((found) => {
    const codes = new Set(found.kind);
    const kinds = facts.kinds.filter((_, code) => codes.has(code));
    return new Map(kinds.map((kind) => (kind.startsWith("wait") ? ["waiting", "busy"] : [KIND_NAMES[kind] || kind, nameOfTint(kind)])));
  });
  const keys = entries.map((kinds) => [...kinds].map(([text, tint]) => key(text, tint)));
  return el("p", { class: "legend" }, keys[0].length ? "episode's end, at the foot of its row: " : "", keys[0], keys[1].length ? "parts: " : "", keys[1]);
}

function markLegend(facts) {
  const told = new Set(facts.marks.map(([, kind]) => kind));
  const keys = Object.entries(MARK_NAMES).filter(([kind]) => told.has(kind)).map(([kind, text]) => key(text, MARKS[kind], "upright"));
  return keys.length ? el("p", { class: "legend" }, "upright lines: ", keys) : "";
}

// Index of the first bar of the row that ends after `tick`.
function bisect(layer, row, tick) {
  let low = layer.rows[row];
  let high = layer.rows[row + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (layer.begin[middle] + layer.length[middle] <= tick) low = middle + 1;
    else high = middle;
  }
  return low;
}

function rgb(value) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = value;
  const code = parseInt(probe.fillStyle.slice(1), 16);
  return [code >> 16, (code >> 8) & 255, code & 255];
}

function paintLanes(facts, layers, rows) {
  const tints = facts.kinds.map((kind) => rgb(tintOf(kind)));
  const card = rgb(colour("card"));
  const picture = document.createElement("canvas");

  // The share of each pixel that bars cover, and the kind that covers most of it.
  const cover = (found, row, min, scale, width, share, kinds, most) => {
    share.fill(0);
    most.fill(0);
    const end = found.rows[row + 1];
    for (let i = bisect(found, row, min); i < end; i++) {
      const from = Math.max(0, (found.begin[i] - min) * scale);
      if (from >= width) break;
      const to = Math.min(width, Math.max(from + 0.02, (found.begin[i] + found.length[i] - min) * scale));
      const last = Math.min(width - 1, Math.floor(to));
      for (let pixel = Math.floor(from); pixel <= last; pixel++) {
        const part = Math.min(to, pixel + 1) - Math.max(from, pixel);
        share[pixel] += part;
        if (part > most[pixel]) {
          most[pixel] = part;
          kinds[pixel] = found.kind[i];
        }
      }
    }
  };

  // A kind's colour over the paper, paler where less is covered, as the four bytes of a pixel.
  const shades = new Uint32Array(tints.length * (SHADES + 1));
  tints.forEach((tint, kind) => {
    for (let level = 0; level <= SHADES; level++) {
      const over = 0.25 + (0.75 * level) / SHADES;
      let value = 255;
      for (let channel = 2; channel >= 0; channel--) value = (value << 8) | (card[channel] + (tint[channel] - card[channel]) * over);
      shades[kind * (SHADES + 1) + level] = value;
    }
  });
  const shaded = (kind, covered) => shades[kind * (SHADES + 1) + (covered >= 1 ? SHADES : (covered * SHADES) | 0)];

  return (u, bounds) => {
    const { left, top, width: exact, height } = u.bbox;
    const width = Math.floor(exact);
    const min = u.scales.x.min / facts.tick;
    const scale = width / ((u.scales.x.max - u.scales.x.min) / facts.tick);
    picture.width = width;
    picture.height = rows * LINES;
    const context = picture.getContext("2d");
    const image = context.createImageData(width, rows * LINES);
    const pixels = new Uint32Array(image.data.buffer);
    const columns = layers.map(() => [new Float32Array(width), new Uint8Array(width), new Float32Array(width)]);

    for (let row = 0; row < rows; row++) {
      layers.forEach((found, n) => cover(found, row, min, scale, width, ...columns[n]));
      const [[episodes, ends], [parts, kinds]] = columns;
      for (let pixel = 0; pixel < width; pixel++) {
        if (episodes[pixel] === 0 && parts[pixel] === 0) continue;
        const at = row * LINES * width + pixel;
        const part = parts[pixel] > 0 ? shaded(kinds[pixel], parts[pixel]) : 0;
        const foot = episodes[pixel] > 0 ? shaded(ends[pixel], episodes[pixel]) : part;
        for (let line = 0; line < LINES - 1; line++) pixels[at + line * width] = part;
        pixels[at + (LINES - 1) * width] = foot;
      }
    }
    context.putImageData(image, 0, 0);
    u.ctx.save();
    u.ctx.imageSmoothingEnabled = false;
    const scaleY = height / (u.scales.y.max - u.scales.y.min);
    for (const lane of bounds) {
      u.ctx.drawImage(picture, 0, lane.first * LINES, width, lane.count * LINES, left, top + lane.top * scaleY, width, lane.height * scaleY);
    }
    drawMarks(u, facts, bounds, scaleY);
    u.ctx.restore();
  };
}

function drawMarks(u, facts, bounds, scaleY) {
  const { ctx, bbox } = u;
  for (const lane of bounds) {
    const rowHeight = (lane.height * scaleY) / lane.count;
    const above = bbox.top + lane.top * scaleY - 1;
    ctx.fillStyle = colour("line");
    if (rowHeight >= 6) for (let row = 1; row < lane.count; row++) ctx.fillRect(bbox.left, above + row * rowHeight, bbox.width, 1);
    ctx.fillStyle = colour("dim");
    ctx.fillRect(bbox.left, above, bbox.width, 1.5);
  }

  const drawn = {};
  for (const [second, kind, process] of facts.marks) {
    const x = u.valToPos(second, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width || x - (drawn[kind + process] ?? -9) < 3) continue;
    drawn[kind + process] = x;
    const lane = kind !== "weights" && bounds.find((each) => each.name === process);
    const [from, tall] = lane ? [lane.top * scaleY, lane.height * scaleY] : [0, bbox.height];
    ctx.fillStyle = colour(MARKS[kind]);
    ctx.globalAlpha = kind === "weights" ? 0.45 : 1;
    ctx.fillRect(x, bbox.top + from, kind === "weights" ? 1 : 3, tall);
  }
}

function gestures(chart, zoom, pan, everything) {
  const pointers = new Map();
  const over = chart.over;
  over.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / over.clientWidth);
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / over.clientWidth);
  }, { passive: false });
  over.addEventListener("dblclick", everything);
  over.addEventListener("pointerdown", (event) => pointers.set(event.pointerId, event.offsetX));
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) over.addEventListener(name, (event) => pointers.delete(event.pointerId));
  over.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = [...pointers.values()];
    pointers.set(event.pointerId, event.offsetX);
    const now = [...pointers.values()];
    if (now.length === 1) pan((before[0] - now[0]) / over.clientWidth);
    else zoom(Math.max(8, Math.abs(before[0] - before[1])) / Math.max(8, Math.abs(now[0] - now[1])), (now[0] + now[1]) / 2 / over.clientWidth);
  });
}

function barAt(chart, layers, bounds, event) {
  const facts = report.runs[report.chosen].timeline;
  const down = chart.posToVal(event.offsetY, "y");
  const lane = bounds.find((each) => down >= each.top && down < each.top + each.height);
  if (!lane) return null;
  const row = lane.first + Math.floor(((down - lane.top) / lane.height) * lane.count);
  const tick = chart.posToVal(event.offsetX, "x") / facts.tick;
  for (const found of [layers[1], layers[0]]) {
    const i = bisect(found, row, tick);
    if (i < found.rows[row + 1] && found.begin[i] <= tick) {
      const kind = facts.kinds[found.kind[i]];
      return { lane: lane.name, kind, ref: found.ref[i], begin: found.begin[i] * facts.tick, seconds: found.length[i] * facts.tick, isTicket: !NOT_OF_TICKETS.has(kind) && !kind.startsWith("wait") };
    }
  }
  return null;
}

function barText(bar) {
  const what = bar.isTicket ? `ticket ${bar.ref}` : bar.kind === "load" ? `version ${bar.ref}` : `step ${bar.ref + 1}`;
  return `${bar.lane}: ${bar.kind}, ${what}, ${clock(bar.seconds)} from ${clock(bar.begin)}`;
}

function nearMark(chart, facts, event) {
  const near = 4 * (chart.scales.x.max - chart.scales.x.min) / chart.over.clientWidth;
  const second = chart.posToVal(event.offsetX, "x");
  const found = facts.marks.filter(([at]) => Math.abs(at - second) < near);
  return found.map(([at, kind, process, text]) => `${kind} ${process} ${text}, at ${clock(at)}`).slice(0, 2).join(" · ");
}
