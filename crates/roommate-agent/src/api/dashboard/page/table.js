// A table of which only the rows in sight exist.

import { el } from "./words.js";

const ROW = 30, SPARE = 6;

export class Table {
  /** `columns`: `{ name, title, of(row) → text or node, by?(row) → sort key, class? }`. */
  constructor(root, { label, columns, onselect, key, empty }) {
    Object.assign(this, { columns, onselect, key, empty, rows: [], sorted: null, selected: null });
    this.head = el("tr");
    this.body = el("tbody");
    this.above = el("tbody", { "aria-hidden": "true" }, el("tr", {}, el("td", { colspan: columns.length, class: "space" })));
    this.below = this.above.cloneNode(true);
    this.table = el("table", { "aria-label": label }, el("thead", {}, this.head), this.above, this.body, this.below);
    this.scroller = el("div", { class: "rows", tabindex: 0, role: "region", "aria-label": label }, this.table);
    this.none = el("p", { class: "none" }, empty);
    root.append(this.scroller, this.none);
    for (const column of columns) this.head.append(this.header(column));
    // Kept, because asking the browser after a change makes it lay out everything at once.
    [this.top, this.tall] = [0, 400];
    this.scroller.addEventListener("scroll", () => { this.top = this.scroller.scrollTop; this.fill(); }, { passive: true });
    new ResizeObserver(() => { this.tall = this.scroller.clientHeight; this.fill(); }).observe(this.scroller);
  }

  header(column) {
    const cell = el("th", { scope: "col", class: column.class });
    if (!column.by) {
      cell.append(column.title);
      return cell;
    }
    cell.append(el("button", { type: "button", onclick: () => this.sort(column, cell) }, column.title));
    return cell;
  }

  sort(column, cell) {
    const down = this.sorted?.column === column && !this.sorted.down;
    this.sorted = { column, down };
    for (const other of this.head.children) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    this.show(this.rows);
  }

  show(rows) {
    this.rows = rows;
    if (this.sorted) {
      const { column, down } = this.sorted;
      const sign = down ? -1 : 1;
      this.rows = rows.slice().sort((a, b) => {
        const [x, y] = [column.by(a), column.by(b)];
        if (x === y) return 0;
        if (x === null || x === undefined) return 1;
        if (y === null || y === undefined) return -1;
        return x < y ? -sign : sign;
      });
    }
    this.none.hidden = rows.length > 0;
    this.scroller.hidden = rows.length === 0;
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.fill();
  }

  fill() {
    const last = Math.min(this.rows.length, Math.ceil((this.top + this.tall) / ROW) + SPARE);
    const first = Math.max(0, Math.min(Math.floor(this.top / ROW) - SPARE, last));
    this.above.firstChild.firstChild.style.height = `${first * ROW}px`;
    this.below.firstChild.firstChild.style.height = `${(this.rows.length - last) * ROW}px`;
    this.above.hidden = first === 0;
    this.below.hidden = last === this.rows.length;
    const wanted = last - first;
    while (this.body.children.length > wanted) this.body.lastChild.remove();
    while (this.body.children.length < wanted) this.body.append(this.line());
    for (let at = first; at < last; at++) this.write(this.body.children[at - first], this.rows[at], at);
  }

  line() {
    const line = el("tr", { onclick: () => this.onselect(line.row) });
    for (const column of this.columns) {
      const cell = el(column === this.columns[0] ? "th" : "td", { class: column.class });
      if (column === this.columns[0]) {
        cell.scope = "row";
        const open = el("button", { type: "button", class: "open" });
        open.addEventListener("click", (event) => { event.stopPropagation(); this.onselect(line.row); });
        cell.append(open);
      }
      line.append(cell);
    }
    return line;
  }

  write(line, row, at) {
    line.row = row;
    line.setAttribute("aria-rowindex", at + 2);
    line.classList.toggle("selected", this.key(row) === this.selected);
    this.columns.forEach((column, n) => {
      const cell = n === 0 ? line.children[0].firstChild : line.children[n];
      const value = column.of(row);
      if (value instanceof Node) cell.replaceChildren(value);
      else if (cell.textContent !== value) cell.textContent = value;
      if (typeof value === "string" && n > 0) cell.title = value.length > 24 ? value : "";
      if (column.mark) column.mark(cell, row);
    });
  }
}
