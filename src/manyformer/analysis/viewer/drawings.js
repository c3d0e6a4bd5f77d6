function canvasOf(panel, width, height) {
  const ratio = window.devicePixelRatio || 1, canvas = element("canvas", {role: "img", tabIndex: 0});
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  context.scale(ratio, ratio);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  const {map, head} = panel, heads = head < 0 ? "mean of its heads" : `head ${head}`;
  canvas.ariaLabel = `Attention weights of ${map.name}, ${heads}: ${map.rowTokens.length} queries, ${map.columnTokens.length} keys`;
  return {canvas, context, color: (name) => style.getPropertyValue(`--${name}`).trim()};
}

function fit(context, text, width) {
  let shown = visible(text);
  if (context.measureText(shown).width <= width) return shown;
  while (shown.length > 1 && context.measureText(`${shown}…`).width > width) shown = shown.slice(0, -1);
  return `${shown}…`;
}

const widest = (context, tokens, limit) => Math.min(limit, Math.max(...tokens.map((t) => context.measureText(visible(t)).width)));

/** One head as a map: a row for each query, a column for each key, and at the right the largest weight of each row. */
function drawMap(panel, map, {largest}) {
  const rows = map.rowTokens.length, columns = map.columnTokens.length, available = panel.view.clientWidth || 320;
  const probe = document.createElement("canvas").getContext("2d");
  probe.font = "12px system-ui";
  const left = Math.ceil(widest(probe, map.rowTokens, Math.min(120, available * 0.28))) + 8, strip = 26;
  const top = Math.ceil(widest(probe, map.columnTokens, 96)) + 8;
  // as high as the window has room below the header and the title
  const tall = Math.max(12, (window.innerHeight - top - 170) / rows);
  let cell = Math.min(MAX_CELL_PIXELS, tall, (available - left - strip) / columns);
  if (cell >= 3) cell = Math.floor(cell);
  const width = left + columns * cell + strip, height = top + rows * cell + 2;
  const {canvas, context, color} = canvasOf(panel, width, height);
  const cells = document.createElement("canvas"), x = (k) => left + k * cell, y = (q) => top + q * cell;
  drawCells(cells, map, panel.head, Infinity);
  context.fillStyle = color("blank");
  context.fillRect(left, top, columns * cell, rows * cell);
  context.imageSmoothingEnabled = cell * (window.devicePixelRatio || 1) < 1;
  context.drawImage(cells, left, top, columns * cell, rows * cell);
  context.fillStyle = color("surface");
  for (let k = 1; cell >= 8 && k < columns; k++) context.fillRect(x(k) - 0.5, top, 1, rows * cell);
  for (let q = 1; cell >= 8 && q < rows; q++) context.fillRect(left, y(q) - 0.5, columns * cell, 1);
  context.fillStyle = color("accent");
  largest.forEach((weight, q) => context.fillRect(x(columns) + 5, y(q), Math.min(1, weight) * (strip - 6), Math.max(1, cell - 1)));
  const every = Math.max(1, Math.ceil(MIN_LABEL_PIXELS / cell));
  context.fillStyle = color("ink");
  context.textAlign = "right";
  context.font = `${clamp(cell, MIN_LABEL_PIXELS, 12)}px system-ui`;
  for (let q = 0; q < rows; q += every) context.fillText(fit(context, map.rowTokens[q], left - 8), left - 5, y(q + 0.5));
  context.textAlign = "left";
  for (let k = 0; k < columns; k += every) {
    context.save();
    context.translate(x(k + 0.5), top - 5);
    context.rotate(-Math.PI / 2);
    context.fillText(fit(context, map.columnTokens[k], top - 8), 0, 0);
    context.restore();
  }
  context.fillStyle = color("mark");
  if (map.memory) context.fillRect(x(map.memory) - 1.5, top - 6, 3, rows * cell + 8);
  const bands = [element("div", {className: "band"}), element("div", {className: "band"})];
  const tags = [element("div", {className: "tag"}), element("div", {className: "tag"})];
  panel.view.replaceChildren(canvas, ...bands, ...tags);
  listen(canvas, (px, py) => ({
    query: clamp(Math.floor((py - top) / cell), 0, rows - 1), key: clamp(Math.floor((px - left) / cell), 0, columns - 1),
  }));
  return (query, key) => {
    place(bands[0], left, y(query), columns * cell, cell);
    place(bands[1], x(key), top, cell, key < 0 ? 0 : rows * cell);
    bands[1].hidden = tags[1].hidden = key < 0;
    tags[0].textContent = visible(map.rowTokens[query]);
    tags[0].style.transform = `translate(${left - 2}px, ${y(query + 0.5)}px) translate(-100%, -50%)`;
    if (key < 0) return;
    tags[1].textContent = visible(map.columnTokens[key]);
    const shift = x(key) > width / 2 ? "-100%" : "0";
    tags[1].style.transform = `translate(${x(key + 0.5)}px, ${top - 3}px) translate(${shift}, -100%)`;
  };
}

function place(node, x, y, width, height) {
  node.style.transform = `translate(${x - 1}px, ${y - 1}px)`;
  node.style.width = `${width + 2}px`;
  node.style.height = `${height + 2}px`;
}

/** Follows the pointer over a canvas: `locate` turns its place into a selection. */
function listen(canvas, locate) {
  canvas.onpointermove = canvas.onpointerdown = (event) => select(locate(event.offsetX, event.offsetY), true);
}

/** One head as lines from each query at the left to its keys at the right. */
function drawLines(panel, map, {weights, largest}) {
  const rows = map.rowTokens.length, columns = map.columnTokens.length;
  if (Math.max(rows, columns) > MAX_LINE_TOKENS) {
    const reason = `Lines are drawn for at most ${MAX_LINE_TOKENS} tokens; here are ${Math.max(rows, columns)}.`;
    panel.view.replaceChildren(element("p", {className: "note"}, reason));
    return null;
  }
  const step = 20, width = Math.min(620, panel.view.clientWidth || 320), height = 8 + step * Math.max(rows, columns);
  const {canvas, context, color} = canvasOf(panel, width, height), y = (i) => 4 + step * (i + 0.5);
  const side = Math.min(widest(context, [...map.rowTokens, ...map.columnTokens], 130), width * 0.3) + 10;
  panel.view.replaceChildren(canvas);
  let isKey = false;
  listen(canvas, (px, py) => {
    const index = Math.floor((py - 4) / step);
    isKey = px > width / 2;
    return isKey ? {key: clamp(index, 0, columns - 1)} : {query: clamp(index, 0, rows - 1), key: -1};
  });
  return (query, key) => {
    context.clearRect(0, 0, width, height);
    for (let q = 0; q < rows; q++) {
      for (let k = 0; k < columns; k++) {
        const weight = weights[q * columns + k], isChosen = key >= 0 && isKey ? k === key : q === query;
        if (weight === 0) continue;
        const share = Math.abs(weight) / (selection.scale === "row" ? largest[q] || 1 : 1);
        context.globalAlpha = clamp(share * (isChosen ? 1 : 0.2), 0, 1);
        context.strokeStyle = isChosen ? color("mark") : color("accent");
        context.lineWidth = isChosen ? 1 + 2 * share : 1;
        context.beginPath();
        context.moveTo(side, y(q));
        context.bezierCurveTo(width / 2, y(q), width / 2, y(k), width - side, y(k));
        context.stroke();
      }
    }
    context.globalAlpha = 1;
    for (const [tokens, align, x, chosen] of [[map.rowTokens, "right", side - 6, query], [map.columnTokens, "left", width - side + 6, key]]) {
      context.textAlign = align;
      tokens.forEach((token, i) => {
        context.fillStyle = i === chosen ? color("mark") : color("ink");
        context.fillText(fit(context, token, side - 8), x, y(i));
      });
    }
  };
}

/** The text itself: each key shaded by its weight for the query, each query underlined by its weight for the key. */
function drawTokens(panel, map) {
  const rows = map.rowTokens.length, columns = map.columnTokens.length, isSquare = map.rows === map.columns;
  const slider = element("input", {type: "range", min: 0, max: rows - 1, ariaLabel: "query token"});
  const position = element("span");
  slider.oninput = () => select({query: Number(slider.value), key: -1}, true);
  const chips = (tokens, onPoint) => {
    const isSpaced = tokens.some((token) => /^\s/.test(token)), line = element("div", {className: "chips"});
    const isJoined = (token, index) => isSpaced && index > 0 && /^[^\s<]/.test(token);
    const nodes = tokens.map((token, index) => {
      return element("span", {className: isJoined(token, index) ? "chip joined" : "chip"}, visible(token));
    });
    if (tokens === map.columnTokens && map.memory) nodes[map.memory].classList.add("present");
    nodes.forEach((node, index) => (node.onpointerenter = node.onclick = () => select(onPoint(index), true)));
    line.append(...nodes);
    return [line, nodes];
  };
  const [keyLine, keys] = chips(map.columnTokens, (key) => (isSquare ? {query: key, key: -1} : {key}));
  const [queryLine, queries] = isSquare ? [null, keys] : chips(map.rowTokens, (query) => ({query, key: -1}));
  const steps = element("label", {className: "steps"}, map.keys === "source" ? "step" : "query", slider, position);
  const lines = isSquare ? [keyLine] : [queryLine, element("p", {className: "label"}, map.keys === "source" ? "source" : "keys"), keyLine];
  const legend = isSquare ? "Shaded: what the query attends to. Underlined: what attends to the query."
    : "Shaded: what the query attends to. Underlined: what attends to the key under the pointer.";
  panel.view.replaceChildren(steps, ...lines, element("p", {className: "label"}, legend));
  const {weights, largest} = map.read(panel.head);
  return (query, key, row, maximum) => {
    slider.value = query;
    position.textContent = `${query + 1} of ${rows}`;
    const target = isSquare ? query : key;
    keys.forEach((node, k) => paint(node, row[k], maximum));
    queries.forEach((node, q) => {
      node.classList.toggle("query", q === query);
      node.classList.toggle("later", map.keys === "source" && q > query);
      underline(node, target < 0 ? null : weights[q * columns + target], largest[q]);
    });
  };
}

/** The steps or layers of each token as bars; steps with halting probabilities are shaded by them. */
function countBars(count, tokens) {
  const mean = count.numbers.reduce((sum, number) => sum + number, 0) / count.numbers.length;
  const bars = element("div", {className: "bars"});
  count.numbers.forEach((number, index) => {
    const stack = element("div", {className: "stack", title: `${visible(tokens[index])}: ${number} ${count.label}`});
    const cells = count.halting?.[index] ?? [null];
    for (const probability of cells) {
      const cell = element("i", probability === null ? {} : {title: `halts here: ${percent(probability)}`});
      cell.style.height = `${(60 * (probability === null ? number : 1)) / count.maximum}px`;
      if (probability !== null) cell.style.opacity = 0.2 + 0.8 * probability;
      stack.append(cell);
    }
    bars.append(element("div", {}, stack, String(number), element("div", {className: "token"}, visible(tokens[index]))));
  });
  return element("section", {className: "counts"}, element("h3", {}, `${count.title}: mean ${mean.toFixed(2)} of at most ${count.maximum}`), bars);
}

/** The image with the patch of the query, and beside it what the query attends to. */
function drawImage(panel, map) {
  const {width, height, corners, size} = panel.run.image, bytes = new Uint8Array(panel.pixels);
  const rgba = new ImageData(width, height), available = panel.view.clientWidth || 320, gap = 12;
  for (let i = 0; i < width * height; i++) rgba.data.set([...bytes.subarray(3 * i, 3 * i + 3), 255], 4 * i);
  const source = element("canvas", {width, height}), side = available < 420 ? available : (available - gap) / 2;
  source.getContext("2d").putImageData(rgba, 0, 0);
  const zoom = Math.min(side, 380) / width, isStacked = available < 420, shift = isStacked ? [0, height * zoom + gap] : [width * zoom + gap, 0];
  const {canvas, context, color} = canvasOf(panel, width * zoom + shift[0], height * zoom + shift[1]);
  const slider = element("input", {type: "range", min: 0, max: corners.length - 1, ariaLabel: "query token"});
  slider.oninput = () => select({query: Number(slider.value), key: -1}, true);
  panel.view.replaceChildren(element("label", {className: "steps"}, "query", slider), canvas);
  listen(canvas, (px, py) => {
    const isKey = isStacked ? py > shift[1] : px > shift[0];
    const [x, y] = [(px - (isKey ? shift[0] : 0)) / zoom, (py - (isKey ? shift[1] : 0)) / zoom];
    const token = corners.findIndex((corner) => corner && y >= corner[0] && y < corner[0] + size && x >= corner[1] && x < corner[1] + size);
    return token < 0 ? {} : isKey ? {key: token} : {query: token, key: -1};
  });
  return (query, key, row, maximum) => {
    slider.value = query;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(source, 0, 0, width * zoom, height * zoom);
    context.globalAlpha = 0.35;
    context.drawImage(source, ...shift, width * zoom, height * zoom);
    context.globalAlpha = 0.72;
    corners.forEach((corner, k) => {
      const level = corner ? shade(row[k] ?? 0, maximum) : -1;
      if (level < 0) return;
      context.fillStyle = `rgb(${colorOf(row[k], level).join(" ")})`;
      context.fillRect(shift[0] + corner[1] * zoom, shift[1] + corner[0] * zoom, size * zoom, size * zoom);
    });
    context.globalAlpha = 1;
    context.strokeStyle = color("mark");
    context.lineWidth = 3;
    for (const [token, [x, y]] of [[query, [0, 0]], [query, shift], [key, shift]]) {
      if (corners[token]) context.strokeRect(x + corners[token][1] * zoom, y + corners[token][0] * zoom, size * zoom, size * zoom);
      context.lineWidth = 1.5;
    }
  };
}
