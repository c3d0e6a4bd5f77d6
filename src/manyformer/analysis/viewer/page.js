"use strict";

const VIEWS = {map: "Map", lines: "Lines", tokens: "Tokens", image: "Image"};
const MAX_LINE_TOKENS = 64, THUMB_PIXELS = 64, MIN_LABEL_PIXELS = 9, MAX_CELL_PIXELS = 44, LISTED_KEYS = 5;
// colors from the smallest weight above 0 to the largest; the luminance is monotonic
const COLORS = {
  light: ["#f7f9e3", "#b9dd83", "#4cb87c", "#21818c", "#39508b", "#3b0650"],
  dark: ["#251c40", "#3b4687", "#2a788e", "#22a884", "#7ad151", "#fde725"],
};
const NEGATIVE = {light: ["#fdeee2", "#f0a46a", "#b3430c", "#5c1a00"], dark: ["#3a1c10", "#9c4414", "#ee8a4b", "#ffd2b0"]};

const page = JSON.parse(document.getElementById("data").textContent);
const selection = {part: null, head: -1, query: 0, key: -1, view: "map", scale: "row"};
let opening = null;  // what the page opened on
const panels = [], extensions = [];  // functions that add to a panel each time it is drawn

function element(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);  // strings become text nodes, never markup
  return node;
}

const BARS = " Bars at the right of the map: the largest weight of each row, from 0 to 1.";
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const percent = (weight) => (100 * weight).toFixed(Math.abs(weight) < 0.0995 ? 1 : 0) + "%";
const visible = (token) => token.trim() || "␣";
const isDark = () => document.documentElement.dataset.theme === "dark";
const themeName = () => (isDark() ? "dark" : "light");
const rgb = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));

function ramp(stops) {
  const colors = stops.map(rgb), table = new Uint8ClampedArray(256 * 4);
  for (let level = 0; level < 256; level++) {
    const place = (level / 255) * (colors.length - 1), low = Math.min(Math.floor(place), colors.length - 2);
    for (let channel = 0; channel < 3; channel++) {
      table[4 * level + channel] = colors[low][channel] + (place - low) * (colors[low + 1][channel] - colors[low][channel]);
    }
    table[4 * level + 3] = 255;
  }
  return table;
}

const RAMPS = {};
for (const theme of ["light", "dark"]) RAMPS[theme] = [ramp(COLORS[theme]), ramp(NEGATIVE[theme])];

/** The place of a color in a table of the ramp, or -1 for a weight of exactly 0, which stays blank. */
function shade(weight, rowMaximum) {
  const share = weight / (selection.scale === "row" ? rowMaximum || 1 : 1);
  return weight === 0 ? -1 : clamp(Math.round(255 * Math.abs(share)), 0, 255);
}

/** Shades the background of a node, and its text to contrast; a node that has this shade already is left alone. */
function paint(node, weight, rowMaximum) {
  const level = shade(weight, rowMaximum), key = weight < 0 ? -level - 2 : level;
  if (node.level === key) return;
  node.level = key;
  const [r, g, b] = level < 0 ? [] : colorOf(weight, level);
  node.style.background = level < 0 ? "" : `rgb(${r} ${g} ${b})`;
  node.style.color = level < 0 ? "" : 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10131a" : "#ffffff";
}

function underline(node, weight, rowMaximum) {
  const level = weight === null ? -1 : shade(weight, rowMaximum), key = weight < 0 ? -level - 2 : level;
  if (node.underline === key) return;
  node.underline = key;
  node.style.borderBottomColor = level < 0 ? "" : `rgb(${colorOf(weight, level).join(" ")})`;
}

const colorOf = (weight, level, theme = themeName()) => RAMPS[theme][weight < 0 ? 1 : 0].subarray(4 * level, 4 * level + 3);

/** The maps of a run, each with a function from a head (-1 for their mean) to weights and the largest one of each row. */
function readMaps(run, buffer) {
  const size = (map) => [run.sequences[map.rows].length, run.sequences[map.columns].length];
  let row = 0, cell = 4 * run.maps.reduce((total, map) => total + map.heads * size(map)[0], 0);
  return run.maps.map((record) => {
    const [rows, columns] = size(record), firstRow = row, firstCell = cell, cache = new Map();
    row += record.heads * rows;
    cell += record.heads * rows * columns;
    function decode(head) {
      const scales = new Float32Array(buffer, 4 * (firstRow + head * rows), rows);
      const levels = new Int8Array(buffer, firstCell + head * rows * columns, rows * columns);
      const weights = new Float32Array(rows * columns);
      for (let i = 0, q = 0; q < rows; q++) {
        const scale = scales[q] / 126.5;
        for (let k = 0; k < columns; k++, i++) weights[i] = (levels[i] - Math.sign(levels[i]) / 2) * scale;
      }
      return {weights, largest: scales};
    }
    function mean() {
      const weights = new Float32Array(rows * columns), largest = new Float32Array(rows);
      for (let head = 0; head < record.heads; head++) {
        const {weights: values} = read(head);
        for (let i = 0; i < values.length; i++) weights[i] += values[i] / record.heads;
      }
      weights.forEach((weight, i) => (largest[(i / columns) | 0] = Math.max(largest[(i / columns) | 0], Math.abs(weight))));
      return {weights, largest};
    }
    function read(head) {
      if (!cache.has(head)) cache.set(head, head < 0 ? mean() : decode(head));
      return cache.get(head);
    }
    return {...record, rowTokens: run.sequences[record.rows], columnTokens: run.sequences[record.columns], read};
  });
}

/** Draws a map at one pixel per cell, or as the largest weights of squares if it has more cells per side than `limit`. */
function drawCells(canvas, map, head, limit) {
  const {weights, largest} = map.read(head), rows = map.rowTokens.length, columns = map.columnTokens.length;
  const step = Math.max(1, Math.ceil(Math.max(rows, columns) / limit));
  canvas.width = Math.ceil(columns / step);
  canvas.height = Math.ceil(rows / step);
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  const [positive, negative] = RAMPS[themeName()], levels = new Int16Array(canvas.width * canvas.height);
  for (let i = 0, q = 0; q < rows; q++) {
    const line = ((q / step) | 0) * canvas.width, maximum = largest[q];
    for (let k = 0; k < columns; k++, i++) {
      if (weights[i] === 0) continue;
      const level = 1 + shade(weights[i], maximum), target = line + ((k / step) | 0);
      if (level > Math.abs(levels[target])) levels[target] = weights[i] < 0 ? -level : level;
    }
  }
  levels.forEach((level, i) => {
    const from = 4 * (Math.abs(level) - 1);
    if (level) image.data.set((level < 0 ? negative : positive).subarray(from, from + 4), 4 * i);
  });
  context.putImageData(image, 0, 0);
}

// in a text of few tokens the largest weight of a row is large by chance
const MIN_KEYS = 4, LONG_TEXT = 10, MIN_STRUCTURE = 0.75;

/** How a head attends to single other tokens: the mean, over rows with at least MIN_KEYS keys, of the largest weight of a
    key that is neither the row's own token nor the first one, on which weight rests that nothing else needs; and the row and
    key of the largest. */
function structureOf(map, head) {
  const {weights} = map.read(head), rows = map.rowTokens.length, columns = map.columnTokens.length;
  const isOwnText = map.rows === map.columns, best = {structure: 0, query: 0, key: -1}, step = Math.ceil(rows / 256);
  let total = 0, counted = 0, peak = 0;
  for (let q = 0; q < rows; q += step) {
    let largest = 0, key = -1, keys = 0;
    for (let k = 0; k < columns; k++) {
      const weight = Math.abs(weights[q * columns + k]);
      if (weight > 0) keys++;
      if (weight > largest && !(isOwnText && (k === 0 || k === q))) [largest, key] = [weight, k];
    }
    if (keys < MIN_KEYS) continue;
    total += largest;
    counted++;
    if (largest > peak) {
      peak = largest;
      Object.assign(best, {query: q, key});
    }
  }
  return {...best, structure: counted ? total / counted : 0};
}

/** What a page opens on: the head with the most structure, at its largest weight; in a short text in which no head has enough,
    the mean of the heads of the last layer, at the first row that has half as many keys as the fullest one. */
function openingOf(panel) {
  let best = {structure: 0};
  for (const map of panel.maps) {
    for (let head = 0; head < map.heads; head++) {
      const found = structureOf(map, head);
      const isEnough = map.columnTokens.length >= LONG_TEXT || found.structure >= MIN_STRUCTURE;
      if (isEnough && found.structure > best.structure) best = {...found, part: map.name, head};
    }
  }
  if (best.part) return best;
  const map = panel.map, {weights} = map.read(panel.head), columns = map.columnTokens.length;
  const keys = map.rowTokens.map((_, q) => weights.subarray(q * columns, (q + 1) * columns).filter((weight) => weight !== 0).length);
  return {part: null, head: -1, query: keys.findIndex((count) => 2 * count >= Math.max(...keys)), key: -1, structure: 0};
}

class Panel {
  constructor(run, buffer, pixels) {
    this.run = run;
    this.pixels = pixels;
    const groups = [...new Set(run.maps.map((map) => map.group))];
    this.maps = readMaps(run, buffer).sort((a, b) => groups.indexOf(a.group) - groups.indexOf(b.group));
    this.overview = element("nav", {className: "overview", ariaLabel: "Layers and heads"});
    this.stage = element("section", {className: "stage"});
    const heading = element("h2", {}, run.name ? `${run.name} ` : "", element("span", {}, run.title));
    this.node = element("section", {className: "run"}, heading);
    if (this.maps.length) this.node.append(this.overview, this.stage);
    if (run.outcome) this.node.append(outcomeSection(run.outcome));
    for (const count of run.counts) this.node.append(countBars(count, run.sequences[count.tokens]));
    this.thumbs = [];
    this.groups = new Map();
    const heads = Math.max(1, ...this.maps.map((map) => map.heads));
    this.overview.style.setProperty("--thumb", heads <= 4 ? "62px" : heads <= 8 ? "48px" : "40px");
    this.maps.forEach((map) => this.addLayer(map));
    this.buildStage();
  }

  /** The selected map: the one of this name, or else the one at the same place. */
  get map() {
    return this.maps.find((map) => map.name === selection.part) ?? this.maps[this.maps.length - 1];
  }
  get head() { return this.map.heads === 1 ? 0 : Math.min(selection.head, this.map.heads - 1); }
  get query() { return clamp(selection.query, 0, this.map.rowTokens.length - 1); }
  get key() { return Math.min(selection.key, this.map.columnTokens.length - 1); }

  addLayer(map) {
    if (!this.groups.has(map.group)) {
      this.groups.set(map.group, element("div", {className: "group"}, element("h3", {}, map.group, element("span", {}, map.title))));
      this.overview.append(this.groups.get(map.group));
    }
    const numbers = map.name.match(/\d+/g) ?? [""], layer = element("div", {className: "layer"});
    layer.append(element("span", {title: map.name}, numbers.join(".")));
    for (let head = map.heads > 1 ? -1 : 0; head < map.heads; head++) {
      const label = map.labels?.[head] ? `: ${map.labels[head]}` : "", name = head < 0 ? "mean of heads" : `head ${head}${label}`;
      const canvas = element("canvas"), title = `${map.name}, ${name}`;
      const thumb = element("button", {className: head < 0 ? "thumb mean" : "thumb", title, ariaLabel: title}, canvas);
      thumb.onclick = () => select({part: map.name, head});
      layer.append(thumb);
      this.thumbs.push({map, head, thumb, canvas});
    }
    this.groups.get(map.group).append(layer);
  }

  buildStage() {
    this.title = element("h3");
    this.readout = element("p", {className: "readout", role: "status"});
    this.view = element("div", {className: "view"});
    this.top = element("ol", {className: "top", ariaLabel: "Keys with the largest weights"});
    this.note = element("p", {className: "note"});
    const {image, ...others} = VIEWS, views = choice(this.pixels ? {image, ...others} : others, "view", "View");
    const save = element("span", {className: "save"}, "Save map", ...["PNG", "SVG"].map((format) =>
      element("button", {ariaLabel: `Save the map as ${format}`, onclick: () => savePicture(this, format)}, format)));
    const side = element("div", {className: "side"}, this.readout, this.top, this.note);
    this.stage.append(element("div", {className: "title"}, this.title, views, save), element("div", {className: "body"}, this.view, side));
  }

  drawThumbs(start = 0) {
    for (const {map, head, canvas} of this.thumbs.slice(start, start + 8)) drawCells(canvas, map, head, THUMB_PIXELS);
    if (start + 8 < this.thumbs.length) setTimeout(() => this.drawThumbs(start + 8));
  }

  draw() {
    if (!this.maps.length) return;
    const {map, head} = this, name = head < 0 ? `mean of ${map.heads} heads` : map.heads > 1 ? `head ${head}` : "";
    const label = map.labels?.[head] ? ` · ${map.labels[head]}` : "";
    this.title.replaceChildren(map.name, element("span", {}, name ? ` · ${name}${label}` : ""));
    for (const {map: own, head: number, thumb} of this.thumbs) thumb.ariaPressed = String(own === map && number === head);
    const pooled = this.run.pooling > 1 ? ` Each cell is the largest of ${this.run.pooling} × ${this.run.pooling} weights.` : "";
    this.note.textContent = `${map.title[0].toUpperCase()}${map.title.slice(1)}. ${map.note}${pooled}${selection.view === "map" ? BARS : ""}${this.reason()}`;
    const draw = {map: drawMap, lines: drawLines, tokens: drawTokens, image: this.pixels ? drawImage : drawMap}[selection.view];
    this.point = draw(this, map, map.read(head));
    for (const extend of extensions) extend(this);
    this.follow();
  }

  /** Why the page opened on the selected head, if it did. */
  reason() {
    const {part, head, structure} = opening;
    if (!part || this.map.name !== part || this.head !== head) return "";
    return ` The page opens on this head: of all heads, its tokens attend most to one other token than the first, with ${percent(structure)} on average.`;
  }

  /** Shows the selected query and key without drawing the weights again. */
  follow() {
    if (!this.maps.length) return;
    const {map, query, key} = this, {weights, largest} = map.read(this.head), columns = map.columnTokens.length;
    const row = weights.subarray(query * columns, (query + 1) * columns);
    const quoted = (token) => element("b", {}, visible(token));
    const maximum = `largest weight of the row ${percent(largest[query])}`;
    this.readout.replaceChildren(quoted(map.rowTokens[query]), ` (${query})`);
    const weight = row[key] === 0 ? "no weight" : percent(row[key]);
    if (key >= 0) this.readout.append(" → ", quoted(map.columnTokens[key]), ` (${key}): ${weight}, ${maximum}`);
    else this.readout.append(`: ${maximum}`);
    const order = [...row.keys()].sort((a, b) => Math.abs(row[b]) - Math.abs(row[a])).slice(0, LISTED_KEYS);
    this.top.replaceChildren(...order.filter((k) => row[k] !== 0).map((k) => {
      const bar = element("i");
      bar.style.width = `${Math.max(1, (100 * Math.abs(row[k])) / Math.max(1, largest[query]))}%`;
      const token = element("span", {className: "token"}, visible(map.columnTokens[k]));
      return element("li", {}, token, bar, element("output", {}, percent(row[k])));
    }));
    this.point?.(query, key, row, largest[query]);
  }
}

function choice(options, name, label) {
  const group = element("div", {className: "choice", role: "group", ariaLabel: label});
  for (const [value, text] of Object.entries(options)) {
    const button = element("button", {}, text);
    button.dataset.choice = name;
    button.dataset.value = value;
    button.onclick = () => select({[name]: value});
    group.append(button);
  }
  return group;
}

function select(change, isPointOnly = false) {
  Object.assign(selection, change);
  if (isPointOnly) return panels.forEach((panel) => panel.follow());
  if ("scale" in change) panels.forEach((panel) => panel.drawThumbs());
  for (const button of document.querySelectorAll("[data-choice]")) {
    button.ariaPressed = String(selection[button.dataset.choice] === button.dataset.value);
  }
  panels.forEach((panel) => panel.draw());
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const canvas = document.querySelector(".legend canvas"), context = canvas.getContext("2d");
  const image = new ImageData(RAMPS[theme][0].slice(), 256, 1);
  context.putImageData(image, 0, 0);
  panels.forEach((panel) => panel.drawThumbs());
  select({});
}

function moveTo(change) {
  const {map, head, query, key} = panels[0], maps = panels[0].maps, index = maps.indexOf(map) + (change.layer ?? 0);
  if (change.layer) return select({part: maps[clamp(index, 0, maps.length - 1)].name});
  if (change.head) return select({head: clamp(head + change.head, map.heads > 1 ? -1 : 0, map.heads - 1)});
  if (change.query) return select({query: clamp(query + change.query, 0, map.rowTokens.length - 1)}, true);
  return select({key: clamp(key + change.key, -1, map.columnTokens.length - 1)}, true);
}

const next = (options, value) => options[(options.indexOf(value) + 1) % options.length];
const KEYS = {
  ArrowUp: () => moveTo({query: -1}), ArrowDown: () => moveTo({query: 1}),
  ArrowLeft: () => moveTo({key: -1}), ArrowRight: () => moveTo({key: 1}),
  h: () => moveTo({head: -1}), l: () => moveTo({head: 1}), k: () => moveTo({layer: -1}), j: () => moveTo({layer: 1}),
  m: () => select({head: -1}),
  v: () => select({view: next(Object.keys(VIEWS).filter((view) => view !== "image" || panels[0].pixels), selection.view)}),
  p: () => panels.forEach((panel) => savePicture(panel, "PNG")),
  s: () => select({scale: next(["row", "whole"], selection.scale)}), t: () => setTheme(isDark() ? "light" : "dark"),
  "?": () => document.getElementById("help").showModal(),
};

document.onkeydown = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) return;
  if (!(event.key in KEYS) || document.getElementById("help").open) return;
  event.preventDefault();
  KEYS[event.key]();
};

async function show(data) {
  const buffers = await Promise.all(data.runs.map((run) => inflate(run.weights)));
  const images = await Promise.all(data.runs.map((run) => run.image && inflate(run.image.pixels)));
  if (!panels.length && images.some(Boolean)) selection.view = "image";
  panels.splice(0, panels.length, ...data.runs.map((run, index) => new Panel(run, buffers[index], images[index])));
  const runs = document.getElementById("runs");
  runs.className = panels.length > 1 ? "pair" : "";
  runs.replaceChildren(...panels.map((panel) => panel.node));
  document.getElementById("text").textContent = data.text;
  document.title = `Attention: ${data.runs.map((run) => run.name || run.title).join(", ")}`;
  if (!opening && panels[0].maps.length) {
    opening = openingOf(panels[0]);
    const {structure, ...chosen} = opening;
    Object.assign(selection, chosen);
  }
  select({});
  panels.forEach((panel) => panel.drawThumbs());
}
