// What both kinds of page share. Texts of agents and users reach the page through text nodes alone.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const scheme = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = scheme.matches
  ? ["#6cb4f0", "#f0a067", "#6cc795", "#cf94e8", "#f08f97", "#c3cf66", "#5cc6cf", "#d0ab82"]
  : ["#1b6ca8", "#c2571a", "#2a7f4f", "#8a3ea6", "#a3333d", "#5b6b00", "#00747c", "#6a4b2a"];
scheme.addEventListener("change", () => location.reload()); // the address keeps the place
const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const LAYOUT = {
  font: { family: "system-ui, sans-serif", size: 12, color: shade("ink") },
  margin: { l: 55, r: 10, t: 28, b: 40 },
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: shade("paper"),
};
const CONFIG = { displayModeBar: false, responsive: true };

// Invisible and direction-changing characters, written out.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufeff\uffa0\ufff0-\ufffb\u{1bca0}-\u{1bca3}\u{1d159}\u{1d173}-\u{1d17a}\u{e0000}-\u{e00ff}\u{e01f0}-\u{e0fff}]|(?<=[\u180b-\u180d\u180f\ufe00-\ufe0f\u{e0100}-\u{e01ef}])[\u180b-\u180d\u180f\ufe00-\ufe0f\u{e0100}-\u{e01ef}]/gu;
const visible = (text) =>
  text.replace(HIDDEN, (sign) => `⟨U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

// Return a new element. Strings among the children become text nodes.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null).map((c) => (c instanceof Node ? c : visible(String(c)))));
  return made;
}

// Return the elements of the first portion of what is long, and a button that adds the next one.
// A call takes some ten thousand arguments, and a browser lays out some ten thousand elements a second.
function inPortions(count, size, unit, elementsOf) {
  const portion = (from) => {
    const to = Math.min(count, from + size);
    if (to === count) return elementsOf(from, to);
    const title = `show ${Math.min(size, count - to)} of ${count - to} more ${unit}`;
    const button = element("button", { type: "button", class: "more", onclick: () => button.replaceWith(...portion(to)) }, title);
    return [...elementsOf(from, to), button];
  };
  return portion(0);
}

// Return the text nodes of a text, in portions.
function textOf(text) {
  const characters = Array.from(text);
  const part = (from, to) => [element("span", {}, characters.slice(from, to).join(""))];
  return inPortions(characters.length, 50000, "characters", part);
}

const largest = (values, least) => values.reduce((most, value) => Math.max(most, value), least);

// Return a label for plotly, which would read tags in it.
const label = (text) => visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Return the text of a compressed block of the page.
async function unpacked(id) {
  const packed = atob(find(id).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

let drawing = null; // of plotly.js, which is unpacked once

function plotly() {
  drawing ??= unpacked("plotly").then((source) => {
    document.head.append(Object.assign(document.createElement("script"), { textContent: source }));
    return window.Plotly;
  });
  return drawing;
}

async function draw(id, traces, layout) {
  const library = await plotly();
  await library.react(find(id), traces, { ...LAYOUT, ...layout }, CONFIG);
  performance.mark(`drawn-${id}`);
}

const round = (value, digits = 3) => (value === null || value === undefined ? "" : String(+Number(value).toPrecision(digits)));
const signed = (value, digits = 3) => (value > 0 ? "+" : "") + round(value, digits).replace("-", "−");
const interval = (one, scale) =>
  one ? `${(scale * one.mean).toFixed(scale === 100 ? 1 : 2)} [${(scale * one.low).toFixed(scale === 100 ? 1 : 2)}, ${(scale * one.high).toFixed(scale === 100 ? 1 : 2)}]` : "";

// Return a table: a caption, column titles, and rows of texts.
function table(caption, titles, rows) {
  const cells = (row, kind) => row.map((text, i) => element(i ? kind : "th", { scope: i ? null : "row" }, text));
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...titles.map((text) => (text ? element("th", { scope: "col" }, text) : element("td", {}))))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row, "td")))),
  );
}

// Return a plotly trace of points with intervals, one a name; `of` gives mean, low and high.
function withIntervals(names, of, name, colour, scale) {
  const each = names.map(of);
  const values = each.map((one) => one && scale * one.mean);
  return {
    type: "scatter",
    mode: "markers",
    orientation: "h",
    name,
    x: values,
    y: names.map(label),
    marker: { color: colour, size: 8 },
    error_x: {
      type: "data",
      symmetric: false,
      array: each.map((one, i) => one && scale * one.high - values[i]),
      arrayminus: each.map((one, i) => one && values[i] - scale * one.low),
      color: colour,
    },
  };
}

// Return a layout of small plots, as many beside each other as the window is wide for.
function panels(titles, below) {
  const columns = Math.max(1, Math.min(titles.length, Math.floor(innerWidth / 280)));
  const rows = Math.ceil(titles.length / columns);
  const layout = { grid: { rows, columns, pattern: "independent", ygap: 0.45 }, height: 260 * rows, annotations: [] };
  titles.forEach((title, i) => {
    const end = i ? i + 1 : "";
    layout[`xaxis${end}`] = { title: { text: below }, gridcolor: shade("grid"), nticks: 6 };
    layout[`yaxis${end}`] = { gridcolor: shade("grid"), zeroline: false };
    layout.annotations.push({ text: title, showarrow: false, xref: `x${end} domain`, yref: `y${end} domain`, x: 0, y: 1.12, xanchor: "left" });
  });
  return layout;
}
const axes = (i) => (i ? { xaxis: `x${i + 1}`, yaxis: `y${i + 1}` } : {});
