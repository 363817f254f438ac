// The trees of one iteration: questions, the chosen tree as an icicle, keys. Its paths are in conversation.js.

const TINTS = {
  entropy: { title: "entropy", kind: "entropy", middle: 0 },
  advantage: { title: "advantage", middle: 0, signed: true },
  gap: { title: "log-probability gap", middle: 0, signed: true },
  ratio: { title: "importance ratio", middle: 1, signed: true },
  clipped: { title: "clipped (share of leaves)", middle: 0, most: 1 },
};
const FEW = 200, MANY = 5000; // tokens of a portion: of a sibling beside the chosen path, and on it
const view = { block: null, question: 0, leaf: 0, tint: "entropy", shown: [] };
const opened = new Map(); // iteration -> its block, unpacked; the last few

// ---------------------------------------------------------------- values of a tree

// Return the value of each token of a node; a leaf's advantages begin at `start` of its tokens.
function valuesOf(node, name, leaf = null, start = 0) {
  const packed = name === "advantage" ? leaf.advantage : node[name];
  const at = name === "advantage" ? start : 0;
  const one = (i) => (packed === undefined ? null : Array.isArray(packed) ? packed[at + i] : packed);
  return Array.from({ length: node.size }, (_, i) => {
    const value = one(i);
    return value === null || value === undefined ? null : value / data.scales[name];
  });
}

const isTurn = (node) => node.kind === "turn";

function pathTo(question, last) {
  const path = [];
  for (let at = last; at >= 0; at = question.nodes[at].parent) path.unshift(at);
  return path;
}

// Add to a question, once: children and leaves of each node, the path of each leaf, and advantages.
function grow(question) {
  if (question.children) return question;
  const count = question.nodes.length;
  question.children = Array.from({ length: count }, () => []);
  question.through = Array.from({ length: count }, () => []);
  question.nodes.forEach((node, i) => node.parent >= 0 && question.children[node.parent].push(i));
  const sums = new Array(count).fill(0), counted = new Array(count).fill(0);
  question.starts = []; // leaf -> node -> its first place among the leaf's sampled tokens
  question.leaves.forEach((leaf, i) => {
    const starts = {};
    let place = 0;
    for (const at of pathTo(question, leaf.node)) {
      const node = question.nodes[at];
      question.through[at].push(i);
      if (!isTurn(node)) continue;
      starts[at] = place;
      for (const value of valuesOf(node, "advantage", leaf, place)) {
        if (value !== null) (sums[at] += value), counted[at]++;
      }
      place += node.size;
    }
    question.starts.push(starts);
  });
  question.advantages = sums.map((sum, i) => (counted[i] ? sum / counted[i] : null));
  return question;
}

// ---------------------------------------------------------------- choosing

async function open(number) {
  if (!opened.has(number)) {
    if (opened.size > 3) opened.delete(opened.keys().next().value);
    opened.set(number, JSON.parse(await unpacked(`block-${number}`)));
  }
  return opened.get(number);
}

const of = (leaf, i) => (leaf.of ? `${leaf.of}${leaf.leaf === undefined ? "" : ` ${leaf.leaf}`}` : String(i));
const here = () => data.iterations.filter((one) => one.there).map((one) => one.number);

async function showIteration(number, question = null, leaf = 0) {
  view.block = await open(number);
  find("iteration").value = String(number);
  const whole = data.iterations.find((one) => one.number === number).questions, own = view.block.questions.length;
  find("note").textContent = own < whole ? `The page has ${own} of the ${whole} questions of this iteration, which is large.` : "";
  const outcomes = [...new Set(view.block.questions.flatMap((one) => one.leaves.map((l) => l.outcome)))].sort();
  const before = find("outcome").value;
  find("outcome").replaceChildren(...["", ...outcomes].map((name) => element("option", { value: name, selected: name === before }, name || "any")));
  filter();
  const place = question === null ? -1 : view.block.questions.findIndex((one) => one.id === question);
  if (place >= 0 && !view.shown.includes(place)) clearSearch();
  await showQuestion(place >= 0 ? place : view.shown[0] ?? 0, leaf);
}

function fits(leaf) {
  const from = parseFloat(find("reward-from").value), to = parseFloat(find("reward-to").value);
  const outcome = find("outcome").value;
  return !(leaf.reward < from) && !(leaf.reward > to) && (!outcome || leaf.outcome === outcome);
}

function filter() {
  const wanted = find("search").value.trim().toLowerCase();
  const texts = (one) => [one.id, one.kind, one.text, ...one.answers].join("\n").toLowerCase();
  view.shown = view.block.questions.flatMap((one, i) => (texts(one).includes(wanted) && one.leaves.some(fits) ? [i] : []));
  const list = view.shown.map((i) => {
    const one = view.block.questions[i];
    const right = one.leaves.filter((leaf) => leaf.success).length;
    return element(
      "button",
      { type: "button", "data-question": i, onclick: () => showQuestion(i) },
      element("span", { class: "name" }, one.change === undefined ? `${one.id} · ${right} of ${one.leaves.length} right` : `${one.id} · ${one.change || "as before"}`),
      one.text.length > 120 ? `${one.text.slice(0, 120)}…` : one.text,
    );
  });
  find("questions").replaceChildren(...(list.length ? list : [element("p", {}, "No question fits the search.")]));
}

function clearSearch() {
  for (const id of ["search", "reward-from", "reward-to", "outcome"]) find(id).value = "";
  filter();
}

async function search() {
  filter();
  if (!view.shown.includes(view.question) && view.shown.length) await showQuestion(view.shown[0]);
  else mark();
}

async function showQuestion(place, leaf = null) {
  view.question = place;
  const question = grow(view.block.questions[place]);
  const first = question.leaves.findIndex(fits);
  view.leaf = leaf === null ? Math.max(0, first) : Math.min(Math.max(0, leaf), question.leaves.length - 1);
  await showLeaf();
}

async function showLeaf(leaf = view.leaf) {
  view.leaf = leaf;
  const question = view.block.questions[view.question];
  find("leaves").replaceChildren(
    ...question.leaves.map((one, i) =>
      element("button", { type: "button", class: one.success ? "right" : "wrong", "data-leaf": i, onclick: () => showLeaf(i) }, `${of(one, i)}: ${round(one.reward)}`),
    ),
  );
  mark();
  showFacts(question);
  showConversation(question);
  showDecisions(question);
  const place = new URLSearchParams({ iteration: view.block.iteration, question: question.id, leaf });
  history.replaceState(null, "", `#${place}`);
  await showIcicle(question);
}

function mark() {
  const question = view.block.questions[view.question];
  for (const button of find("questions").querySelectorAll("button")) {
    const chosen = Number(button.dataset.question) === view.question;
    button.setAttribute("aria-current", String(chosen));
    if (chosen) button.scrollIntoView({ block: "nearest" });
  }
  for (const button of find("leaves").children) {
    const place = Number(button.dataset.leaf);
    button.setAttribute("aria-current", String(place === view.leaf));
    button.classList.toggle("outside", !fits(question.leaves[place]));
  }
  const nth = view.shown.indexOf(view.question) + 1;
  const leaf = question.leaves[view.leaf];
  find("where").textContent =
    `iteration ${view.block.iteration}, question ${nth || "outside the search"} of ${view.shown.length}, ` +
    `leaf ${view.leaf} of ${question.leaves.length} (${leaf.of ? `${leaf.of}, ` : ""}reward ${round(leaf.reward)}, ${leaf.outcome})`;
}

// ---------------------------------------------------------------- the icicle

// Return how a decision came out, as the rule of the recipe has it.
function ruleOf(decision) {
  const rise = `ΔH = ${round(decision.entropy)} − ${round(decision.initial_entropy)} = ${signed(decision.rise)}`;
  const added = decision.added ? `${decision.added} branches started` : "no branch started";
  if (decision.kind === "mark") return `at a mark: every trajectory branches; ${rise}; ${added}`;
  const { base, weight, threshold, draw } = data.rule;
  const rule = draw ? `drawn with P, ${decision.wanted ? "yes" : "no"}` : `P ${decision.wanted ? ">" : "≤"} ${round(threshold)}`;
  return `after a tool result: ${rise}; P = ${round(base)} + ${round(weight)} × ΔH = ${round(decision.probability, 5)}, ${rule}; ${added}`;
}

// Return for each node whether its leaves are right: from -1, none, to 1, all; null where none was scored.
function successes(question) {
  return question.through.map((leaves) => {
    const scored = leaves.map((i) => question.leaves[i].success).filter((success) => success !== null);
    return scored.length ? (2 * scored.filter(Boolean).length) / scored.length - 1 : null;
  });
}

async function showIcicle(question) {
  const path = new Set(pathTo(question, question.leaves[view.leaf].node));
  const decisions = {};
  for (const one of question.decisions) (decisions[one.node] ??= []).push(one);
  const titles = question.nodes.map((node, i) => {
    const marks = (decisions[i] ?? []).map((one) => `${one.added ? "◆" : "◇"}${signed(one.rise, 2)}`);
    return [...marks, node.calls ? node.calls.map((call) => call[0]).join(" + ") : node.kind];
  });
  const colours = question.advantages.some((value) => value !== null) ? question.advantages : successes(question);
  const most = largest(colours.map((value) => Math.abs(value ?? 0)), 0.01);
  const about = (node, i) => [
    `node ${i}: ${node.kind}${node.outcome ? `, ${node.outcome}` : ""}`,
    `${node.size} tokens, leaves ${question.through[i].join(", ")}`,
    question.advantages[i] === null ? "no advantage" : `mean advantage ${signed(question.advantages[i])}`,
    ...(decisions[i] ?? []).map(ruleOf),
  ];
  const trace = {
    type: "icicle",
    ids: question.nodes.map((_, i) => String(i)),
    labels: titles.map((lines) => lines.map(label).join("<br>")),
    parents: question.nodes.map((node) => (node.parent < 0 ? "" : String(node.parent))),
    values: question.nodes.map((node) => (node.kind === "prompt" ? 0 : Math.max(1, node.size))), // a prompt may be longer than all that follows
    branchvalues: "remainder",
    sort: false,
    textinfo: "label",
    textfont: { color: "#1d2530" }, // on the light colours of the scale, in the dark, too
    hoverinfo: "text",
    hovertext: question.nodes.map((node, i) => about(node, i).map(label).join("<br>")),
    tiling: { orientation: "v", pad: 1 },
    pathbar: { visible: false },
    marker: {
      colors: colours.map((value, i) => (isTurn(question.nodes[i]) ? value ?? 0 : 0)),
      colorscale: [[0, "#c0392b"], [0.5, "#f4f4f1"], [1, "#2166ac"]],
      cmin: -most,
      cmid: 0,
      cmax: most,
      showscale: true,
      colorbar: { title: { text: colours === question.advantages ? "A" : "right" }, thickness: 10, len: 0.7 },
      line: { width: question.nodes.map((_, i) => (path.has(i) ? 3 : 0.5)), color: question.nodes.map((_, i) => (path.has(i) ? shade("ink") : shade("edge"))) },
    },
  };
  await draw("icicle", [trace], { height: 430, margin: { l: 4, r: 4, t: 4, b: 4 }, uniformtext: { minsize: 8, mode: "hide" } });
  const shown = find("icicle");
  if (!shown.dataset.listens) {
    shown.dataset.listens = "yes";
    shown.on("plotly_icicleclick", (event) => {
      const now = view.block.questions[view.question];
      const through = now.through[Number(event.points[0].id)];
      if (through.length && !through.includes(view.leaf)) showLeaf(through[0]);
      return false; // do not zoom
    });
  }
}

function showDecisions(question) {
  const path = new Set(pathTo(question, question.leaves[view.leaf].node));
  const own = question.decisions.filter((one) => path.has(one.node));
  const listed = (decisions) => element("ul", {}, ...decisions.map((one) => element("li", {}, `node ${one.node}, ${ruleOf(one)}`)));
  const [started, others] = [own.filter((one) => one.added), own.filter((one) => !one.added)];
  const folded = element("details", {}, element("summary", {}, `${others.length} places on this path where none started`), listed(others));
  find("decisions").replaceChildren(
    ...(started.length ? [element("h3", {}, "Branches on this path"), listed(started)] : []),
    ...(others.length ? [folded] : []),
  );
}

// ---------------------------------------------------------------- keys, and the start

const KEYS = {
  ArrowUp: () => step(view.shown, view.question, -1, showQuestion),
  ArrowDown: () => step(view.shown, view.question, 1, showQuestion),
  ArrowLeft: () => step(leavesShown(), view.leaf, -1, showLeaf),
  ArrowRight: () => step(leavesShown(), view.leaf, 1, showLeaf),
  "[": () => step(here(), view.block.iteration, -1, showIteration),
  "]": () => step(here(), view.block.iteration, 1, showIteration),
  t: () => step(Object.keys(TINTS), view.tint, 1, showTint, true),
  "/": () => find("search").focus(),
};

function leavesShown() {
  const leaves = view.block.questions[view.question].leaves;
  const own = leaves.flatMap((leaf, i) => (fits(leaf) ? [i] : []));
  return own.length ? own : leaves.map((_, i) => i);
}

// Show the entry of a list that is `by` places after the current one.
function step(list, current, by, show, around = false) {
  const place = list.indexOf(current);
  const next = around ? (place + by) % list.length : place < 0 ? 0 : place + by;
  if (next in list && list[next] !== current) return show(list[next]);
}

function showTint(name) {
  view.tint = find("measure").value = name;
  showConversation(view.block.questions[view.question]);
}

function pressed(event) {
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
}

async function showPlace() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const place = asked.has("iteration") ? asked : new URLSearchParams(data.opening ?? {});
  const known = here().find((number) => String(number) === place.get("iteration"));
  const number = known ?? data.opening?.iteration ?? here().at(-1);
  await showIteration(number, place.get("question"), Math.trunc(Number(place.get("leaf"))) || 0);
  if (asked.has("iteration") && known === undefined) {
    find("note").textContent = `Iteration ${asked.get("iteration")} is not in this page: beamline page ${data.recipe} --iteration ${Number(asked.get("iteration"))}`;
  }
  if (asked.has("question")) find("forest").scrollIntoView();
}

function listen() {
  const options = data.iterations.map(({ number, leaves, there }) =>
    element("option", { value: number, disabled: !there }, there ? `${number} (${typeof number === "number" ? `${leaves} leaves` : "of each agent"})` : `${number} (not in this page)`),
  );
  find("iteration").append(...options);
  find("iteration").addEventListener("change", (event) => showIteration(here().find((number) => String(number) === event.target.value)));
  find("measure").append(...Object.entries(TINTS).map(([name, { title }]) => element("option", { value: name }, title)));
  find("measure").addEventListener("change", (event) => showTint(event.target.value));
  for (const id of ["search", "reward-from", "reward-to", "outcome"]) find(id).addEventListener("input", search);
  find("conversation").addEventListener("mouseover", showToken);
  document.addEventListener("keydown", pressed);
  window.addEventListener("hashchange", showPlace);
}

showResults();
showChanged();
showBefore();
showAlarms();
showRises();
listen();
plotly(); // begins to unpack it
showPlace().then(showIntervals).then(showCurves);
