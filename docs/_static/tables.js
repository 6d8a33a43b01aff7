// A table that is wider than the page: smaller first, then each row as a list of "column: value".
function fitTables() {
  for (const table of document.querySelectorAll(".table-wrapper > table.docutils")) {
    const isTooWide = () => table.parentElement.scrollWidth > table.parentElement.clientWidth + 1;
    table.classList.remove("dense", "stacked");
    if (isTooWide()) table.classList.add("dense");
    if (isTooWide()) table.classList.add("stacked");
  }
}

// A name or a call may break behind its separators, so that a narrow column does not break it within a word.
function allowBreaks(code) {
  const texts = [];
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const parts = text.data.split(/(?<=[_.,/([-])(?=\w)/);
    text.replaceWith(...parts.flatMap((part, index) => (index ? [document.createElement("wbr"), part] : [part])));
  }
}

addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table.docutils td code.literal").forEach(allowBreaks);
  for (const table of document.querySelectorAll(".table-wrapper > table.docutils")) {
    const columns = [...table.querySelectorAll("thead th")].map((cell) => cell.innerText.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, index) => (cell.dataset.column = columns[index] ?? ""));
  }
  fitTables();
  document.fonts.ready.then(fitTables);
  addEventListener("resize", fitTables);
});
