/** Pictures of a map for papers and pages: SVG with one rectangle a cell, and PNG drawn from it; always on white. */
const PICTURE_CELL = 22, MAX_RECTANGLES = 10000, PNG_SCALE = 2;

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  // characters that XML has no place for
  if (text !== undefined) node.textContent = text.toWellFormed?.().replace(/[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g, "�") ?? text;
  return node;
}

/** The map of a panel's selected head as an SVG element. */
function mapPicture(panel) {
  const {map, head} = panel, {weights, largest} = map.read(head), rows = map.rowTokens.length, columns = map.columnTokens.length;
  const cell = clamp(900 / Math.max(rows, columns), 1, PICTURE_CELL), probe = document.createElement("canvas").getContext("2d");
  probe.font = `${Math.min(13, cell)}px sans-serif`;
  const left = Math.ceil(widest(probe, map.rowTokens, 160)) + 14, top = Math.ceil(widest(probe, map.columnTokens, 160)) + 36;
  const width = Math.max(left + columns * cell + 8, 360), height = top + rows * cell + 34;
  const size = {xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, "font-family": "sans-serif", fill: "#1b2027"};
  const picture = svg("svg", size), heads = head < 0 ? `mean of ${map.heads} heads` : `head ${head}`;
  const add = (tag, attributes, text) => picture.append(svg(tag, attributes, text));
  add("rect", {width, height, fill: "#ffffff"});
  add("text", {x: 8, y: 20, "font-size": 14, "font-weight": "bold"}, `${map.name}, ${heads}`);
  add("rect", {x: left, y: top, width: columns * cell, height: rows * cell, fill: "#e9ecf0"});
  const step = Math.max(1, Math.ceil(Math.sqrt((rows * columns) / MAX_RECTANGLES))), gap = cell >= 8 ? 0.5 : 0;
  for (let q = 0; q < rows; q += step) {
    for (let k = 0; k < columns; k += step) {
      // the largest of a square of cells where each of its own would be too many
      let weight = 0, level = -1;
      for (let r = q; r < Math.min(q + step, rows); r++) {
        for (let c = k; c < Math.min(k + step, columns); c++) {
          const own = shade(weights[r * columns + c], largest[r]);
          if (own > level) [weight, level] = [weights[r * columns + c], own];
        }
      }
      if (level < 0) continue;
      const side = step * cell - 2 * gap, fill = `rgb(${colorOf(weight, level, "light").join(",")})`;
      add("rect", {x: left + k * cell + gap, y: top + q * cell + gap, width: side, height: side, fill});
    }
  }
  const every = Math.max(1, Math.ceil(MIN_LABEL_PIXELS / cell)), font = {"font-size": clamp(cell - 4, MIN_LABEL_PIXELS, 13), "dominant-baseline": "central"};
  for (let q = 0; q < rows; q += every) {
    add("text", {...font, x: left - 6, y: top + (q + 0.5) * cell, "text-anchor": "end"}, fit(probe, map.rowTokens[q], 160));
  }
  for (let k = 0; k < columns; k += every) {
    const x = left + (k + 0.5) * cell, y = top - 6;
    add("text", {...font, x, y, transform: `rotate(-90 ${x} ${y})`}, fit(probe, map.columnTokens[k], 160));
  }
  for (let level = 0; level < 64; level++) {
    add("rect", {x: left + 2 * level, y: height - 22, width: 2.5, height: 10, fill: `rgb(${colorOf(1, 4 * level, "light").join(",")})`});
  }
  const scale = selection.scale === "row" ? "largest weight of the row" : "1";
  add("text", {x: left - 6, y: height - 13, "font-size": 11, "text-anchor": "end"}, "0");
  add("text", {x: left + 136, y: height - 13, "font-size": 11}, scale);
  return picture;
}

async function savePicture(panel, format) {
  if (!panel.maps.length) return;
  const {map, head} = panel, picture = mapPicture(panel), name = `${map.name}-${head < 0 ? "mean" : `head-${head}`}`.replace(/[^\w.-]+/g, "-");
  const text = new XMLSerializer().serializeToString(picture);
  let blob = new Blob([text], {type: "image/svg+xml"});
  if (format === "PNG") {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = element("canvas", {width: PNG_SCALE * picture.getAttribute("width"), height: PNG_SCALE * picture.getAttribute("height")});
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    blob = await new Promise((resolve) => canvas.toBlob(resolve));
  }
  // a notebook's frame may save nothing: there the picture is shown, for the browser's own menu
  if (window.parent !== window) return showPicture(blob);
  const link = element("a", {href: URL.createObjectURL(blob), download: `${name}.${format.toLowerCase()}`});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function showPicture(blob) {
  const reader = new FileReader(), dialog = element("dialog", {ariaLabel: "Picture"});
  reader.onload = () => {
    const image = element("img", {src: reader.result, alt: "The map, to be saved by the menu of the browser"});
    dialog.append(image, element("form", {method: "dialog"}, element("button", {}, "Close")));
    dialog.onclose = () => dialog.remove();
    document.body.append(dialog);
    dialog.showModal();
  };
  reader.readAsDataURL(blob);
}
