// Elements, scales and one kind of plot: lines with error bars. All text goes in as text nodes.
const SVG = "http://www.w3.org/2000/svg";
const MARKERS = [
  "M-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0-8.4 0z",
  "M-3.7-3.7h7.4v7.4h-7.4z",
  "M0-5L4.8 3.6H-4.8z",
  "M0-5.4L5.4 0L0 5.4L-5.4 0z",
  "M0 5L4.8-3.6H-4.8z",
  "M-1.6-5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",
  "M-4.6-2.4L-2.4-4.6L0-2.2L2.4-4.6L4.6-2.4L2.2 0L4.6 2.4L2.4 4.6L0 2.2L-2.4 4.6L-4.6 2.4L-2.2 0z",
  "M0-5.2L5-1.6L3.1 4.3H-3.1L-5-1.6z",
  "M-4.6-4.6H4.6L-4.6 4.6H4.6z",
];
const COLOURS = 8;

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

// The full cache, which comes first where it was measured, is no press: it has the colour of the text.
const nth = (press) => press - (FULL + 1);
const colour = (press) => (press === FULL ? "full" : `p${nth(press) % COLOURS}`);
const marker = (press) => (press === FULL ? "" : MARKERS[nth(press) % MARKERS.length]);

// The line and marker of a press, as in the plots.
function key(press) {
  return svg("svg", { class: `key ${colour(press)}`, viewBox: "-14 -7 28 14", "aria-hidden": "true" },
    svg("path", { class: "line", d: "M-13 0H13" }), svg("path", { class: "dot", d: marker(press) }));
}

function linear(max, step) {
  const ticks = Array.from({ length: Math.round(max / step) + 1 }, (_, i) => +(i * step).toFixed(6));
  return { ticks, at: (value) => value / max };
}

// From 0 to just above the largest value, with round ticks.
function upTo(largest) {
  const power = 10 ** Math.floor(Math.log10(largest / 4));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => largest / size <= 5.01);
  return linear(Math.ceil(largest / step - 0.01) * step, step);
}

function logarithmic(smallest) {
  const all = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1];
  const low = all.filter((tick) => tick <= Math.min(smallest, 0.5)).pop() ?? smallest;
  return { ticks: all.filter((tick) => tick >= low), at: (value) => 1 - Math.log(Math.max(value, low)) / Math.log(low) };
}

/* Draws into the figure `host`:
   series: [{press, points: [{x, y, e}]}]; reference: {y, e, label, x}, any of them; pick: called with a selected point;
   tell: the lines of a point's tooltip; summary: what a screen reader hears. */
function plot(host, { x, y, xLabel, yLabel, series, reference, tell, pick, summary }) {
  const width = Math.max(host.clientWidth, 260);
  const height = Math.min(Math.max(width * 0.66, 210), 380);
  const box = { left: 34, right: width - 8, top: 22, bottom: height - 36 };
  const px = (value) => box.left + x.at(value) * (box.right - box.left);
  const py = (value) => box.bottom - y.at(value) * (box.bottom - box.top);
  const across = (value, name) => svg("line", { class: name, x1: box.left, x2: box.right, y1: py(value), y2: py(value) });
  const down = (value, name) => svg("line", { class: name, x1: px(value), x2: px(value), y1: box.top, y2: box.bottom });
  const label = (text, at) => svg("text", at, text);

  const frame = svg("g", {},
    y.ticks.map((tick) => [across(tick, tick ? "gridline" : "axis"),
      label(`${tick}`, { x: box.left - 6, y: py(tick) + 4, "text-anchor": "end" })]).flat(),
    x.ticks.map((tick) => [down(tick, "gridline"),
      label(`${tick}`, { x: px(tick), y: box.bottom + 16, "text-anchor": "middle" })]).flat(),
    label(yLabel, { x: 0, y: 11 }),
    label(xLabel, { x: box.right, y: height - 4, "text-anchor": "end" }));
  if (reference) {
    const { y: level, e, x: at } = reference;
    if (e) frame.append(svg("rect", { class: "reference-band", x: box.left, width: box.right - box.left,
      y: py(level + e), height: py(level - e) - py(level + e) }));
    frame.append(across(level, "reference"));
    if (at) frame.append(down(at, "reference"));
    frame.append(label(reference.label, { class: "reference-label", x: box.right, y: 11, "text-anchor": "end" }));
  }

  const spots = [];
  // The first press is drawn last, over the others.
  const lines = [...series].reverse().map(({ press, points }) => {
    const shown = points.map((point) => ({ point, press, x: px(point.x), y: py(point.y) }));
    const group = svg("g", { class: `series ${colour(press)}`, "data-press": press },
      shown.filter(({ point }) => point.e).map(({ point, x: at }) => svg("path", { class: "bar",
        d: `M${at} ${py(point.y + point.e)}V${py(point.y - point.e)}m-3 0h6M${at - 3} ${py(point.y + point.e)}h6` })),
      svg("path", { class: "line", d: shown.map((spot, i) => `${i ? "L" : "M"}${spot.x} ${spot.y}`).join("") }));
    for (const spot of shown) {
      spot.dot = svg("path", { class: "dot", d: marker(press), transform: `translate(${spot.x} ${spot.y})` });
      group.append(spot.dot);
      spots.push(spot);
    }
    return group;
  });

  const picture = svg("svg", { class: "plot", role: "img", "aria-label": summary, height, viewBox: `0 0 ${width} ${height}` },
    frame, lines);
  const nearest = (event) => {
    const area = picture.getBoundingClientRect();
    const [ex, ey] = [event.clientX - area.left, event.clientY - area.top];
    const far = (spot) => Math.hypot(spot.x - ex, spot.y - ey);
    const best = spots.reduce((one, other) => (far(other) < far(one) ? other : one), spots[0]);
    return best && far(best) < 28 ? best : null;
  };
  const show = (event) => {
    const spot = nearest(event);
    for (const { dot } of spots) dot.classList.toggle("near", dot === spot?.dot);
    picture.classList.toggle("picks", spot !== null && pick !== undefined);
    highlight(spot && spot.press);
    tip(spot && tell(spot.point, spot.press), event);
    return spot;
  };
  // A finger does not hover: its first tap on a point shows the figures, as coming near does for a mouse.
  let tapped = null;
  picture.addEventListener("pointermove", show);
  picture.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") { tip(null); highlight(null); } });
  picture.addEventListener("click", (event) => {
    const spot = show(event);
    const picked = event.pointerType !== "touch" || spot?.dot === tapped;
    tapped = spot && spot.dot;
    if (spot && pick && picked) { tip(null); highlight(null); pick(spot.point, spot.press); }
  });
  host.querySelector("svg.plot")?.remove();
  host.querySelector("figcaption").after(picture);
}

function tip(lines, event) {
  const node = document.getElementById("tip");
  node.hidden = !lines;
  if (!lines) return;
  node.replaceChildren(make("b", {}, lines[0]), ...lines.slice(1).flatMap((line) => [line, make("br")]));
  const left = Math.min(event.pageX + 14, scrollX + document.documentElement.clientWidth - node.offsetWidth - 8);
  node.style.left = `${Math.max(left, scrollX + 8)}px`;
  node.style.top = `${event.pageY + 16}px`;
}

// Fades all other presses, in every plot.
function highlight(press) {
  for (const group of document.querySelectorAll(".series")) {
    group.classList.toggle("dim", press !== null && +group.dataset.press !== press);
  }
}
