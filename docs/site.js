// Words of code stay whole, and a table that is wider than the window becomes a list of its
// rows, each cell under the name of its column.
for (const code of document.querySelectorAll(".md-content :not(pre) > code")) {
  const longest = 42; // Characters that fit a line of 400 pixels.
  if (!/\s/.test(code.textContent) && code.textContent.length <= longest) {
    code.style.whiteSpace = "nowrap";
  }
}
for (const table of document.querySelectorAll(".md-content table")) {
  const names = [...table.querySelectorAll("thead th")].map((th) => th.textContent);
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, column) => (cell.dataset.column = names[column] ?? ""));
  }
}
function listRows() {
  for (const table of document.querySelectorAll(".md-content table")) {
    table.classList.remove("rows"); // As wide as it is as a table.
    const fits = table.scrollWidth <= table.closest("article").clientWidth;
    table.classList.toggle("rows", !fits && window.innerWidth < 720);
  }
}
listRows();
addEventListener("resize", listRows); // A phone was turned.
