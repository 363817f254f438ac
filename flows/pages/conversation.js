// The chosen path as a conversation, with tinted tokens, cards of calls, and siblings side by side.

// Return in words whether a leaf is right, with its score; some are not scored.
function verdictOf(leaf) {
  if (leaf.success === null) return "not scored";
  return `${leaf.success ? "right" : "not right"}, score ${round(leaf.score)}`;
}

function showFacts(question) {
  const leaf = question.leaves[view.leaf];
  const address = leaf.trace && data.links.traces ? `${data.links.traces}${leaf.trace}` : null;
  const trace = !leaf.trace ? [] : [" · trace ", address ? element("a", { href: address, rel: "noreferrer" }, leaf.trace) : leaf.trace];
  const given = leaf.answer === null ? "no answer" : `answer ${leaf.answer}`;
  find("leaf").replaceChildren(
    element("h3", {}, `Leaf ${of(leaf, view.leaf)}: ${leaf.outcome}, reward ${round(leaf.reward)}`),
    element(
      "p", {},
      `${given}, ${verdictOf(leaf)} (accepted: ${question.answers.join(" or ") || "none"})`,
      leaf.faults.length ? `; faults: ${leaf.faults.join(", ")}` : "",
      leaf.kept ? "" : "; dropped by the group filter",
      ...trace,
    ),
  );
}

// Return the largest distance from the middle of a measure in the question, for its colours.
function spanOf(question, name) {
  const { middle, most } = TINTS[name];
  if (most) return most;
  const packed = (name === "advantage" ? question.leaves : question.nodes).map((one) => one[name]);
  const values = packed.flat().filter((value) => value !== undefined);
  return largest(values.map((value) => Math.abs(value / data.scales[name] - middle)), 0.001);
}

// Return how strong the tint of a value is, from 0 to 1. Entropies of most policies lie over decades, with a few
// high ones: between the run's own percentiles, the tint grows evenly with the share of lower values.
function strengthOf(value, name, span) {
  const { middle } = TINTS[name];
  const steps = name === "entropy" ? data.percentiles : [];
  const most = steps.at(-1)?.[1] ?? 0;
  if (!most) return Math.min(1, Math.abs(value - middle) / span);
  const above = steps.findIndex(([, end]) => value < end);
  if (above < 0) return 1;
  const end = steps[above][1], start = above ? steps[above - 1][1] : 0;
  return (above + (value - start) / (end - start)) / steps.length;
}

function tinted(value, name, span) {
  if (value === null) return "";
  const { middle, signed: both } = TINTS[name];
  const part = strengthOf(value, name, span);
  const colour = !both ? "230, 126, 34" : value >= middle ? "52, 120, 190" : "214, 69, 65";
  return `rgba(${colour}, ${((scheme.matches ? 0.45 : 0.65) * part).toFixed(3)})`; // the text stays legible in the dark
}

// Return the text of a turn, a span a token, tinted by the chosen measure, in portions.
function tokensOf(question, at, leaf, start, span, size = MANY) {
  const node = question.nodes[at];
  const values = valuesOf(node, view.tint, leaf, start);
  const texts = node.tokens?.length ? node.tokens.map((i) => view.block.texts[i]) : null;
  if (!texts) return textOf(node.text ?? "");
  const token = (i) => {
    const made = element("span", { class: texts[i].includes("\n") ? "token line" : "token", "data-node": at, "data-place": i, "data-start": start }, texts[i]);
    const colour = tinted(values[i], view.tint, span);
    if (colour) made.style.backgroundColor = colour;
    return made;
  };
  const tokens = (from, to) => Array.from({ length: to - from }, (_, i) => token(from + i));
  return inPortions(texts.length, size, "tokens", tokens);
}

// Return a turn where leaves part: the siblings beside each other, the chosen one marked.
function besides(question, siblings, chosen, own, span) {
  const parent = question.nodes[chosen].parent;
  const columns = siblings.map((at) => {
    const through = question.through[at];
    const leaf = through.includes(own) ? own : through[0];
    const right = through.filter((i) => question.leaves[i].success).length;
    const name = `${through.length > 1 ? "leaves" : "leaf"} ${through.map((i) => of(question.leaves[i], i)).join(", ")}`;
    const advantage = question.advantages[at] === null ? "" : `, A ${signed(question.advantages[at])}`;
    return element(
      "div",
      { class: at === chosen ? "sibling chosen" : "sibling" },
      element("button", { type: "button", onclick: () => showLeaf(leaf), "aria-current": String(at === chosen) }, `${name}: ${right} right${advantage}`),
      element("div", { class: "text" }, ...tokensOf(question, at, question.leaves[leaf], question.starts[leaf][at] ?? 0, span, at === chosen ? MANY : FEW)),
    );
  });
  const rules = question.decisions.filter((one) => one.node === parent && one.added).map(ruleOf);
  return element(
    "div",
    { class: "parting" },
    element("p", { class: "role" }, `${columns.length} siblings part here${rules.length ? `: ${rules.join("; ")}` : ""}`),
    element("div", { class: "siblings" }, ...columns),
  );
}

// Return a card of a call and of its result, or of the act that ended an episode.
function card(call, outcome, result) {
  return element(
    "div",
    { class: "call" },
    element("p", { class: "role" }, `${call ? call[0] : "tool"} · ${outcome}`),
    call?.[1] ? element("pre", { class: "argument" }, ...textOf(call[1])) : null,
    element("pre", { class: "result" }, ...textOf(result)),
  );
}

// Return a card of each call that a node answers; one of a turn with several has its own outcome and text.
function cards(node) {
  return (node.calls ?? [null]).map((call) => card(call, call?.[2] ?? node.outcome, call?.[3] ?? node.text ?? ""));
}

// Return the whole prompts, with the recipe's own message and the marks of the chat template, folded.
function promptsOf(node) {
  const folded = (text, title) => {
    const shown = element("details", { class: "prompt" }, element("summary", {}, title));
    shown.addEventListener("toggle", () => shown.children.length > 1 || shown.append(element("pre", {}, ...textOf(text))));
    return shown;
  };
  if (node.prompts) return node.prompts.map(([name, text]) => folded(text, `the whole prompt of ${name}`));
  return node.prompt ? [folded(node.prompt, `the whole prompt, as the policy reads it (${node.size} tokens)`)] : [];
}

const messageOf = (role, ...text) => element("div", { class: `message ${role}` }, element("p", { class: "role" }, role), ...text);

// Return the elements of the path of a leaf below the question.
function pathOf(question, own, span) {
  const leaf = question.leaves[own];
  const isOwn = (at) => question.through[at].some((i) => question.leaves[i].of === leaf.of);
  return pathTo(question, leaf.node).slice(1).flatMap((at) => {
    const node = question.nodes[at];
    const siblings = question.children[node.parent].filter((other) => isTurn(question.nodes[other]) && isOwn(other));
    const ended = node.step && at === leaf.node ? [card(node.step[3] ? [node.step[3], ""] : null, node.step[0], node.step[1])] : [];
    if (!isTurn(node)) return [...cards(node), ...ended];
    if (siblings.length > 1) return [besides(question, siblings, at, own, span), ...ended];
    return [messageOf("assistant", element("div", { class: "text" }, ...tokensOf(question, at, leaf, question.starts[own][at], span))), ...ended];
  });
}

// Return the path of a leaf of each agent, beside each other: the chosen leaf, and the first of the others.
function columnsOf(question, span) {
  const names = [...new Set(question.leaves.map((leaf) => leaf.of))];
  const columns = names.map((name) => {
    const own = question.leaves[view.leaf].of === name ? view.leaf : question.leaves.findIndex((leaf) => leaf.of === name);
    const leaf = question.leaves[own];
    const title = element("h3", { class: leaf.success ? "right" : "wrong" }, `${of(leaf, own)}: ${verdictOf(leaf)}, ${leaf.outcome}`);
    return element("div", {}, title, ...pathOf(question, own, span));
  });
  return element("div", { class: "columns" }, ...columns);
}

function showConversation(question) {
  const span = spanOf(question, view.tint);
  const asked = [...question.before, ["user", question.text]].map(([role, text]) => messageOf(role, element("div", { class: "text" }, ...textOf(text))));
  const paths = question.leaves[view.leaf].of === undefined ? pathOf(question, view.leaf, span) : [columnsOf(question, span)];
  find("conversation").replaceChildren(...promptsOf(question.nodes[0]), ...asked, ...paths);
  const { title, middle, signed: both } = TINTS[view.tint];
  const byShare = view.tint === "entropy" && data.percentiles.at(-1)?.[1];
  const ends = byShare ? data.percentiles.map(([, value]) => value) : both ? [middle - span, middle, middle + span] : [middle, middle + span];
  const said = (value, i) => ` ${round(value)}${byShare ? ` (${data.percentiles[i][0]} %)` : ""} `;
  find("legend").replaceChildren(
    `${title}${byShare ? " / ln |V|, by the share of the run's tokens below" : ""}: `,
    ...ends.map((value, i) => Object.assign(element("span", { class: "token" }, said(value, i)), { style: `background-color: ${tinted(value, view.tint, span)}` })),
  );
}

function showToken(event) {
  const token = event.target.closest?.(".token[data-node]");
  if (!token) return;
  const question = view.block.questions[view.question];
  const at = Number(token.dataset.node), place = Number(token.dataset.place);
  const through = question.through[at];
  const leaf = question.leaves[through.includes(view.leaf) ? view.leaf : through[0]];
  const each = Object.entries(TINTS).map(([name, { title }]) => {
    const value = valuesOf(question.nodes[at], name, leaf, Number(token.dataset.start))[place];
    return `${title} ${value === null ? "none" : round(value, 4)}`;
  });
  find("token").textContent = `${JSON.stringify(visible(token.textContent))}: ${each.join(", ")}`;
}
