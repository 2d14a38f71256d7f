"use strict";
let DATA = null;
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const state = { strategy: 0, ms: 0, timer: null };
const PLOT = { displayModeBar: false, responsive: true };

const size = (mib) => mib >= 1024 ? `${(mib / 1024).toFixed(mib >= 10240 ? 1 : 2)} GiB` : `${mib >= 1 ? mib.toFixed(0) : mib.toFixed(2)} MiB`;
const time = (ms) => ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : ms >= 1 ? `${ms.toFixed(ms >= 100 ? 0 : 1)} ms` : `${(ms * 1000).toFixed(1)} us`;
function timeTicks(width) {
  const rough = width / 10, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((by) => by * power).find((by) => by >= rough);
  const values = Array.from({ length: Math.floor(width / step) + 1 }, (_, at) => at * step);
  const text = (ms) => width >= 2000 ? `${+(ms / 1000).toPrecision(6)} s` : width >= 2 ? `${+ms.toPrecision(6)} ms` : `${+(ms * 1000).toPrecision(6)} us`;
  return { tickvals: values, ticktext: values.map(text) };
}
const here = () => DATA.strategies[state.strategy];
const unitOf = (s) => s.peak.size >= 2048 ? ["GiB", 1024] : ["MiB", 1];

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function layout(extra) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), color: css("--soft") };
  const made = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 12 },
    margin: { l: 74, r: 12, t: 26, b: 36 }, hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--ink") } } };
  for (const [key, value] of Object.entries(extra)) made[key] = /axis/.test(key) ? { ...axis, ...value } : value;
  return made;
}

// -- strategies ------------------------------------------------------------------------------------------------------
function showStrategies() {
  const table = byId("strategies");
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  DATA.columns.forEach((name, at) => head.append(element("th", name, DATA.words.includes(at) ? "words" : "")));
  const body = table.createTBody();
  DATA.table.forEach((row, at) => {
    const line = body.insertRow();
    if (at === state.strategy) line.className = "on";
    row.forEach((cell, column) => {
      const made = element("td", cell, DATA.words.includes(column) ? "words" : "");
      if (column === DATA.fitsColumn) made.classList.add(DATA.strategies[at].fits ? "good" : "bad");
      line.append(made);
    });
    line.tabIndex = 0;
    line.onclick = () => choose(at);
    line.onkeydown = (event) => { if (event.key === "Enter") choose(at); };
  });
  byId("why").textContent = `${here().name} ${DATA.why[state.strategy]}`;
}

function choose(at) {
  state.strategy = at;
  state.ms = here().peak.ms;
  stop();
  showStrategies();
  showStep();
}

// -- the step --------------------------------------------------------------------------------------------------------
function showStep() {
  const s = here(), [unit, factor] = unitOf(s);
  byId("chosen").textContent = s.name + (s.fits ? "" : " (does not fit: as if memory were enough)");
  byId("detail").textContent = s.detail.join(" ");
  const scaled = (list) => list.map((value) => value / factor);
  const t = [...s.curve.t, s.stepMs];
  const held = (list) => scaled([...list, list[list.length - 1]]);
  const traces = Object.keys(DATA.colours).filter((owner) => s.curve.owners[owner]).map((owner) => ({
    x: t, y: held(s.curve.owners[owner]), name: owner, stackgroup: "owners", mode: "lines",
    line: { width: 0, shape: "hv", color: DATA.colours[owner] }, fillcolor: DATA.colours[owner],
    hovertemplate: `%{y:.2f} ${unit}` }));
  traces.push({ x: t, y: held(s.curve.reserved), name: "reserved", mode: "lines",
    line: { shape: "hv", width: 1.5, dash: "dot", color: css("--ink") }, hovertemplate: `%{y:.2f} ${unit}` });
  if (s.curve.host) traces.push({ x: [...s.curve.host.t, s.stepMs], y: held(s.curve.host.size), name: "in host memory",
    mode: "lines", line: { shape: "hv", width: 2, color: "#9a6a3c" }, hovertemplate: `%{y:.2f} ${unit}` });
  if (s.plain) traces.push({ x: [...s.plain.t, s.plain.stepMs], y: held(s.plain.size), name: "without recompute",
    mode: "lines", line: { shape: "hv", width: 1.5, dash: "dash", color: css("--soft") }, hovertemplate: `%{y:.2f} ${unit}` });
  const top = Math.max(s.peak.size, ...s.curve.reserved, ...(s.plain ? s.plain.size : [0]));
  const shapes = s.phases.map(([phase, from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 1, y1: 1.035,
    fillcolor: DATA.work[phase] || "#999", line: { width: 0 } }));
  const notes = s.phases.filter(([, from, to]) => to - from > s.stepMs / 14).map(([phase, from, to]) => ({ x: (from + to) / 2, xref: "x",
    y: 1.035, yref: "paper", yanchor: "bottom", showarrow: false, text: phase, font: { size: 11, color: css("--soft") } }));
  const near = s.capacity < top * 3;
  if (near) {
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: s.capacity / factor, y1: s.capacity / factor, line: { color: css("--bad"), dash: "dash", width: 1.5 } });
    notes.push({ xref: "paper", x: 0.01, y: s.capacity / factor, yanchor: "bottom", xanchor: "left", showarrow: false, text: `${size(s.capacity)} is what PyTorch can get`, font: { color: css("--bad"), size: 11 } });
  }
  const right = s.peak.ms < s.stepMs * 0.6;
  notes.push({ x: s.peak.ms, y: s.peak.size / factor, text: `peak ${size(s.peak.size)}: ${s.peak.place}`, showarrow: true, arrowhead: 6,
    ax: right ? 24 : -24, ay: -18, xanchor: right ? "left" : "right", font: { size: 12 }, bgcolor: css("--ground"), bordercolor: css("--line"), borderpad: 3 });
  const width = Math.max(s.stepMs, s.plain ? Math.min(s.plain.stepMs, s.stepMs * 1.5) : 0);
  Plotly.react("memory", traces, layout({ hovermode: "x unified", dragmode: false, shapes, annotations: notes, legend: { orientation: "h", y: -0.1, font: { size: 11 } },
    xaxis: { range: [0, width], ...timeTicks(width), ticksuffix: " ms", showspikes: false, hoverformat: ".2f" }, yaxis: { range: [0, Math.max(top, near ? s.capacity : 0) / factor * 1.12], title: { text: unit } } }), PLOT);
  showLanes(s, width);
  moveTo(state.ms);
}

function showLanes(s, width) {
  const traces = [];
  const kinds = [...new Set(s.lanes.flatMap((lane) => Object.keys(lane.work)))];
  if (s.isPipeline) traces.push({ type: "bar", orientation: "h", y: s.lanes.map((_, at) => at), base: 0, x: s.lanes.map(() => s.stepMs), name: "bubble",
    marker: { color: css("--line"), pattern: { shape: "/", fgcolor: css("--soft"), bgcolor: css("--panel"), size: 6, solidity: 0.15 } }, width: 0.8, hoverinfo: "skip" });
  for (const kind of kinds) {
    const y = [], base = [], x = [], opacity = [], custom = [];
    s.lanes.forEach((lane, at) => (lane.work[kind] || []).forEach(([from, to, share]) => {
      y.push(at); base.push(from); x.push(to - from); opacity.push(Math.max(share, 0.2)); custom.push([time(from), time(to), Math.round(share * 100), lane.name]);
    }));
    traces.push({ type: "bar", orientation: "h", y, base, x, width: 0.8, name: kind.replaceAll("_", "-"), customdata: custom,
      marker: { color: DATA.work[kind] || "#888", opacity, line: { width: 0 } },
      hovertemplate: "%{customdata[3]}: %{customdata[0]} to %{customdata[1]}, busy %{customdata[2]} %" });
  }
  const height = 74 + 30 * Math.max(s.lanes.length, 2);
  byId("lanes").style.height = `${height}px`;
  Plotly.react("lanes", traces, layout({ barmode: "overlay", dragmode: false, hovermode: "closest", height, margin: { l: 74, r: 12, t: 4, b: 30 },
    legend: { orientation: "h", y: -30 / (height - 60), yanchor: "top", font: { size: 11 } },
    xaxis: { range: [0, width], showticklabels: false }, yaxis: { autorange: "reversed", tickvals: s.lanes.map((_, at) => at), ticktext: s.lanes.map((lane) => lane.name), tickfont: { size: 10 }, automargin: false } }), PLOT);
}

// -- the cursor ------------------------------------------------------------------------------------------------------
function moveTo(ms) {
  const s = here();
  state.ms = Math.min(Math.max(ms, 0), s.stepMs);
  byId("cursor").value = String(Math.round(state.ms / s.stepMs * 1000));
  byId("now").textContent = time(state.ms);
  for (const id of ["memory", "lanes"]) placeLine(id);
  drawStack(s);
  showRunning(s);
}

function placeLine(id) {
  const chart = byId(id), full = chart._fullLayout;
  if (!full || !full.xaxis) return;
  let line = chart.querySelector(".cursor");
  if (!line) { line = element("div", undefined, "cursor"); chart.append(line); }
  const at = full.xaxis.l2p(state.ms);
  line.style.left = `${full._size.l + at}px`;
  line.style.display = at < -1 || at > full.xaxis._length + 1 ? "none" : "";
}

function aliveAt(s, ms) {
  let first = 0, last = s.curve.t.length;  // of the instants after `ms`
  while (first < last) {
    const middle = (first + last) >> 1;
    if (s.curve.t[middle] <= ms) first = middle + 1; else last = middle;
  }
  const at = Math.max(first - 1, 0);
  return Object.values(s.curve.owners).reduce((sum, sizes) => sum + sizes[at], 0);
}

let drawn = [];
function drawStack(s) {
  const canvas = byId("stack"), ratio = window.devicePixelRatio || 1;
  const wide = canvas.clientWidth, high = canvas.clientHeight;
  canvas.width = wide * ratio; canvas.height = high * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, wide, high);
  const live = s.storages.rows.filter(([from, to]) => from <= state.ms && state.ms < to || (to >= s.stepMs && from <= state.ms));
  const scale = high / (s.peak.size * 1.03);
  let bottom = high;
  drawn = [];
  let total = 0;
  for (const row of live) {
    const tall = row[2] * scale;
    pen.fillStyle = DATA.colours[s.storages.owners[row[3]]] || "#999";
    pen.fillRect(0, bottom - tall, wide, Math.max(tall - (tall > 3 ? 0.6 : 0), 0.2));
    drawn.push([bottom - tall, bottom, row]);
    bottom -= tall;
    total += row[2];
  }
  const there = aliveAt(s, state.ms), small = s.leftOut ? Math.max(there - total, 0) : 0;
  if (small * scale >= 1) {
    pen.fillStyle = css("--line");
    pen.fillRect(0, bottom - small * scale, wide, small * scale);
    drawn.push([bottom - small * scale, bottom, null]);
  }
  const listed = live.length.toLocaleString("en");
  byId("alive").textContent = small ? `${size(total + small)}, the ${listed} largest storages and small ones` : `${size(total)} in ${listed} storages`;
}

function showRunning(s) {
  const list = byId("running");
  list.replaceChildren();
  const best = new Map();
  for (const row of s.kernels.rows) if (row[1] <= state.ms && state.ms < row[1] + row[2]) best.set(row[0], row);
  for (const [lane, row] of [...best].sort((a, b) => a[0] - b[0])) {
    const many = row[5] > 1 ? ` and ${row[5] - 1} more` : "";
    list.append(element("li", `${s.kernels.lanes[lane]}: ${s.kernels.names[row[3]]}${many}, ${s.kernels.paths[row[4]] || "the script"}, ${time(row[2])}`));
  }
  if (!best.size) list.append(element("li", "nothing: the device is idle"));
}

byId("stack").onmousemove = (event) => {
  const y = event.offsetY, found = drawn.find(([top, bottom]) => y >= top && y < bottom);
  if (!found) return;
  const s = here(), row = found[2];
  if (row === null) { byId("pointed").textContent = `Smaller storages, of which ${s.leftOut.toLocaleString("en")} in this step are not listed one by one.`; return; }
  byId("pointed").textContent = `${size(row[2])}, ${s.storages.owners[row[3]]}: ${s.storages.labels[row[4]]}, ${time(row[0])} to ${row[1] >= s.stepMs ? "the end" : time(row[1])}`;
};

function neighbour(direction) {
  const t = here().curve.t;
  if (direction > 0) return t.find((ms) => ms > state.ms + 1e-9) ?? here().stepMs;
  return t.findLast((ms) => ms < state.ms - 1e-9) ?? 0;
}

function stop() {
  if (state.timer !== null) cancelAnimationFrame(state.timer);
  state.timer = null;
  byId("play").textContent = "play";
}

function play() {
  if (state.timer !== null) { stop(); return; }
  byId("play").textContent = "pause";
  if (state.ms >= here().stepMs) state.ms = 0;
  let before = performance.now();
  const frame = (now) => {
    moveTo(state.ms + (now - before) / 12000 * here().stepMs);
    before = now;
    if (state.ms >= here().stepMs) stop(); else state.timer = requestAnimationFrame(frame);
  };
  state.timer = requestAnimationFrame(frame);
}

function dragOn(id) {
  const chart = byId(id);
  let held = false;
  const to = (event) => {
    const full = chart._fullLayout, x = event.clientX - chart.getBoundingClientRect().left - full._size.l;
    if (x >= -4 && x <= full.xaxis._length + 4) moveTo(full.xaxis.p2l(x));
  };
  chart.addEventListener("pointerdown", (event) => {
    if (event.target.closest(".modebar, .legend")) return;
    held = true; stop(); to(event);
  });
  window.addEventListener("pointermove", (event) => { if (held) to(event); });
  window.addEventListener("pointerup", () => { held = false; });
}

// -- plane, explorers, words -----------------------------------------------------------------------------------------
function labelSpots(points) {  // points that lie close together have their names on different sides
  const spots = ["top right", "bottom right", "top left", "bottom left", "middle right", "middle left"];
  const wide = Math.max(...points.map((p) => p.extra), 0.1), high = Math.max(...points.map((p) => p.kept), 1);
  const near = (a, b) => Math.abs(a.extra - b.extra) < wide * 0.15 && Math.abs(a.kept - b.kept) < high * 0.08;
  const order = points.map((_, at) => at).sort((a, b) => points[b].kept - points[a].kept), found = [];
  order.forEach((at, rank) => { found[at] = spots[order.slice(0, rank).filter((other) => near(points[at], points[other])).length % spots.length]; });
  return found;
}

function showPlane() {
  const points = DATA.plane;
  const unit = Math.max(...points.map((p) => p.kept)) >= 2048 ? ["GiB", 1024] : ["MiB", 1];
  Plotly.react("plane", [{ x: points.map((p) => p.extra * 100), y: points.map((p) => p.kept / unit[1]), text: points.map((p) => p.name), mode: "markers+text",
    textposition: labelSpots(points), marker: { size: 12, color: points.map((p) => p.fits ? css("--accent") : css("--bad")) }, customdata: points.map((p) => [p.step]),
    hovertemplate: `%{text}: %{y:.2f} ${unit[0]} kept, +%{x:.0f} % of a forward, step %{customdata[0]}<extra></extra>` }],
  layout({ xaxis: { title: { text: "recomputed kernel time, % of the forward" }, rangemode: "tozero", zeroline: true, range: [-4, Math.max(...points.map((p) => p.extra * 100), 10) * 1.3] },
    yaxis: { title: { text: `activations at most, ${unit[0]}` }, rangemode: "tozero" } }), PLOT);
}

function showExplorers() {
  byId("explorers").replaceChildren(...DATA.explorers.map(explorer));
  DATA.explorers.forEach((data, at) => drawExplorer(data, at));
}

function explorer(data, at) {
  const box = element("div", undefined, "explorer");
  box.append(element("h3", data.title), element("p", data.text, "note"));
  data.at ??= data.axes.map((axis) => axis.start);
  data.axes.forEach((axis, number) => {
    const label = element("label", axis.name), slider = element("input"), shown = element("output", String(axis.values[data.at[number]]));
    Object.assign(slider, { type: "range", min: 0, max: axis.values.length - 1, step: 1, value: data.at[number] });
    slider.dataset.explorer = data.id;
    slider.oninput = () => { data.at[number] = Number(slider.value); shown.textContent = String(axis.values[data.at[number]]); drawExplorer(data, at); };
    label.append(slider, shown);
    box.append(label);
  });
  const chart = element("div", undefined, "chart");
  chart.id = `explorer-${at}`;
  const said = element("p");
  said.id = `said-${at}`;
  box.append(chart, said);
  return box;
}

function pointOf(data, at) {
  return data.points[data.axes.reduce((sum, axis, number) => sum * axis.values.length + at[number], 0)];
}

function drawExplorer(data, number) {
  const axis = data.axes[0], line = axis.values.map((_, at) => pointOf(data, [at, ...data.at.slice(1)]));
  const now = pointOf(data, data.at);
  const colours = [css("--accent"), css("--second")];
  const traces = data.shown.map((metric, index) => ({ x: axis.values, y: line.map((point) => point && point[metric]), name: data.metrics[metric], yaxis: index ? "y2" : "y",
    mode: "lines+markers", marker: { size: axis.values.map((_, at) => at === data.at[0] ? 13 : 5) }, line: { color: colours[index] } }));
  const upright = (index) => ({ rangemode: "tozero", nticks: 6, title: { text: data.metrics[data.shown[index]], font: { color: colours[index], size: 11 } }, tickfont: { color: colours[index] } });
  Plotly.react(`explorer-${number}`, traces, layout({ margin: { l: 60, r: 60, t: 8, b: 40 }, showlegend: false, hovermode: "x unified",
    xaxis: { title: { text: axis.name }, type: data.log ? "log" : "linear", tickangle: 0, tickvals: axis.values, ticktext: axis.values.map((value) => value.toLocaleString("en")) },
    yaxis: upright(0), yaxis2: { ...upright(1), overlaying: "y", side: "right", tickmode: "auto", showgrid: false } }), PLOT);
  byId(`said-${number}`).textContent = now ? data.metrics.map((name, at) => `${name}: ${now[at]}`).join("; ") : "there is no such run: it does not fit, or makes no sense";
}

function showWords() {
  byId("headline").textContent = DATA.headline;
  byId("scenario").textContent = DATA.scenario;
  const table = byId("labels");
  table.replaceChildren();
  for (const [name, label, source] of DATA.labels) {
    const row = table.insertRow();
    row.append(element("td", name), element("td", label, "words"), element("td", source, "words long"));
  }
}

function showAll() {
  showStrategies(); showStep(); showPlane(); showExplorers(); showWords();
}

// -- beginning -------------------------------------------------------------------------------------------------------
async function unpacked(id) {
  const packed = Uint8Array.from(atob(byId(id).textContent), (sign) => sign.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function begin() {
  const script = element("script", await unpacked("plotly"));
  document.head.append(script);
  DATA = JSON.parse(await unpacked("data"));
  byId("unpacking").remove();
  state.ms = here().peak.ms;
  showAll();
  dragOn("memory");
  dragOn("lanes");
  listen();
  document.documentElement.dataset.ready = "yes";
}

function listen() {
  byId("theme").onclick = () => { document.documentElement.classList.toggle("dark"); showAll(); };
  byId("cursor").oninput = (event) => { stop(); moveTo(Number(event.target.value) / 1000 * here().stepMs); };
  byId("play").onclick = play;
  byId("back").onclick = () => { stop(); moveTo(neighbour(-1)); };
  byId("forward").onclick = () => { stop(); moveTo(neighbour(1)); };
  byId("to-peak").onclick = () => { stop(); moveTo(here().peak.ms); };
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, button, tr")) return;
    if (event.key === " ") { event.preventDefault(); play(); }
    if (event.key === "ArrowRight") moveTo(neighbour(1));
    if (event.key === "ArrowLeft") moveTo(neighbour(-1));
  });
  window.addEventListener("resize", () => setTimeout(() => moveTo(state.ms), 200));
}

document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
begin();
