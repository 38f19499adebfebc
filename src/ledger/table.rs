//! Aligned columns.

/// The most characters of a cell: formatting panics at widths above 65535, and other processes choose names.
const MOST: usize = 120;

/// Cells and how a column is aligned: numbers to the right.
pub(crate) struct Table {
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Begins a table; a heading that begins with `>` is a column of numbers.
    pub(crate) fn new(heads: &[&str]) -> Self {
        let head = |head: &&str| head.trim_start_matches('>').to_owned();
        Self {
            right: heads.iter().map(|head| head.starts_with('>')).collect(),
            rows: vec![heads.iter().map(head).collect()],
        }
    }

    /// Adds a row with a cell for each heading.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(cut).collect());
    }

    /// Returns the lines, each with a line break and without blanks at its end.
    pub(crate) fn lines(&self) -> String {
        let width = |column| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells
                .map(|cell: &String| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.right.len()).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, &width), &right) in row.iter().zip(&widths).zip(&self.right) {
                if !line.is_empty() {
                    line += "  ";
                }
                line += &match right {
                    true => format!("{cell:>width$}"),
                    false => format!("{cell:<width$}"),
                };
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

/// Cuts a text of more than [`MOST`] characters, and marks where.
fn cut(mut cell: String) -> String {
    if cell.chars().nth(MOST).is_some()
        && let Some((end, _)) = cell.char_indices().nth(MOST - 1)
    {
        cell.truncate(end);
        cell.push('…');
    }
    cell
}

#[cfg(test)]
mod tests {
    use super::{MOST, Table};

    #[test]
    fn long_cells_are_cut() {
        let mut table = Table::new(&["NAME", ">SIZE"]);
        let whole = "ä".repeat(MOST);
        table.row([whole.clone(), "1".into()]);
        table.row(["ö".repeat(70_000), "2".repeat(70_000)]);
        let text = table.lines();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with(&whole), "{text}");
        assert!(
            lines[2].starts_with(&("ö".repeat(MOST - 1) + "…")),
            "{text}"
        );
        assert_eq!(lines[2].chars().count(), 2 * MOST + 2);
    }

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["NAME", ">SIZE", "WHERE"]);
        table.row(["ä", "1", "node 0"].map(String::from));
        table.row(["longer", "1000", ""].map(String::from));
        assert_eq!(
            table.lines(),
            "NAME    SIZE  WHERE\nä          1  node 0\nlonger  1000\n"
        );
    }
}
