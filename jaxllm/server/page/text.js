// Texts of models are shown as text; only the fences of code blocks have a meaning.

const FENCE = /^```.*$\n?/m;

/** Show a text, which may have grown since it was last shown here. */
export function showText(node, text) {
  const parts = text.split(FENCE).map((part, i, all) => {
    const begun = i % 2 === 0 && i > 0 ? part.replace(/^\n+/, "") : part; // the space around a block is its own
    return i < all.length - 1 ? begun.trimEnd() : begun;
  });
  parts.forEach((part, i) => {
    const kept = node.children[i] ?? node.appendChild(document.createElement(i % 2 ? "pre" : "div"));
    if (kept.textContent !== part) kept.textContent = part;
  });
  while (node.children.length > parts.length) node.lastChild.remove();
}
