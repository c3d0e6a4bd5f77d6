const scales = choice({row: "per row", whole: "0 to 1"}, "scale", "Color scale");
const legend = element("span", {className: "legend"}, element("span", {className: "swatch"}), "0", element("canvas", {width: 256, height: 1}), "largest");
legend.title = "Blank: exactly 0, masked or not computed. Colors: from the smallest weight to the largest of the row, or to 1.";
const theme = element("button", {onclick: KEYS.t}, "light / dark"), help = element("button", {onclick: KEYS["?"], ariaLabel: "Keys"}, "?");
document.getElementById("controls").append(legend, scales, theme, help);
setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
window.onresize = () => panels.forEach((panel) => panel.draw());
if (page.live) startLive();
show(page);
