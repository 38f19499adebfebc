//! Reports: aligned columns of text, and drawings as SVG.
//!
//! A drawing needs no font and no style sheet from elsewhere. It is light, and dark where the viewer prefers that. It uses
//! nothing that converters to other formats lack, such as variables.

use std::fmt::{self, Write};

use crate::text::escape_xml;

/// The most characters of a cell with text of other processes: each row takes as many.
const MOST: usize = 512;

/// The fewest characters to which a cell is cut, so that lines fit.
const LEAST: usize = 8;

/// A mark in the place of what was cut.
const CUT: char = '…';

/// How the cells of a column are shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Numbers, to the right.
    Number,
    /// Text of a few words.
    Word,
    /// Text that is cut at its end if lines would be too long.
    Text,
    /// Text that is cut at its beginning, such as a path.
    Path,
}

/// Cells in columns; columns without any text are left out.
pub struct Table {
    kinds: Vec<Kind>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Begins a table. A heading that begins with `>` is a column of numbers, with `~` of texts that may be cut, with
    /// `/` of paths.
    pub fn new(heads: &[&str]) -> Self {
        let kind = |head: &&str| match head.as_bytes() {
            [b'>', ..] => Kind::Number,
            [b'~', ..] => Kind::Text,
            [b'/', ..] => Kind::Path,
            _ => Kind::Word,
        };
        let head = |head: &&str| head.trim_start_matches(['>', '~', '/']).to_owned();
        Self {
            kinds: heads.iter().map(kind).collect(),
            rows: vec![heads.iter().map(head).collect()],
        }
    }

    /// As [`new`](Self::new), of headings with a comma and a blank between them.
    pub fn with(heads: &str) -> Self {
        Self::new(&heads.split(", ").collect::<Vec<_>>())
    }

    /// Adds a row with a cell for each heading, of at most 512 characters.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells = cells.into_iter().map(|cell| end_cut(&cell, MOST));
        self.rows.push(cells.collect());
    }

    /// As [`row`](Self::row), with cells of any length.
    pub fn whole_row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Returns the lines, each with a line break and without blanks at its end, of at most `most` characters.
    pub fn lines(&self, most: Option<usize>) -> String {
        let widths = self.widths(most.unwrap_or(usize::MAX));
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, &width), &kind) in row.iter().zip(&widths).zip(&self.kinds) {
                if width == 0 {
                    continue;
                }
                if !line.is_empty() {
                    line += "  ";
                }
                let cell = match kind {
                    Kind::Number => cell.clone(),
                    Kind::Path => front_cut(cell, width),
                    Kind::Text | Kind::Word => end_cut(cell, width),
                };
                // Formatting with a width panics above 65535.
                let blanks = " ".repeat(width.saturating_sub(cell.chars().count()));
                line += &match kind {
                    Kind::Number => blanks + &cell,
                    _ => cell + &blanks,
                };
            }
            text += &end_cut(line.trim_end(), most.unwrap_or(usize::MAX));
            text.push('\n');
        }
        text
    }

    /// Returns the columns' widths, 0 for one without text. The widest that may be cut give way until a line has `most`
    /// characters.
    fn widths(&self, most: usize) -> Vec<usize> {
        let length = |cell: &String| cell.chars().count();
        let widest = |column| {
            let cells = self.rows[1..].iter().filter_map(|row| row.get(column));
            let widest = cells.map(length).max().filter(|&widest| widest > 0);
            widest.map_or(0, |widest: usize| widest.max(length(&self.rows[0][column])))
        };
        let mut widths: Vec<usize> = (0..self.kinds.len()).map(widest).collect();
        let columns = widths.iter().filter(|&&width| width > 0).count();
        let mut line = widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1);
        while line > most {
            let columns = widths.iter_mut().zip(&self.kinds).zip(&self.rows[0]);
            let may_be_cut = columns.filter(|((width, kind), head)| {
                matches!(kind, Kind::Text | Kind::Path) && **width > LEAST.max(length(head))
            });
            let Some(((width, _), _)) = may_be_cut.max_by_key(|((width, _), _)| **width) else {
                break;
            };
            *width -= 1;
            line -= 1;
        }
        widths
    }
}

/// Cuts a text of more than `most` characters at its end, and marks it.
pub fn end_cut(text: &str, most: usize) -> String {
    if text.char_indices().nth(most).is_none() {
        return text.to_owned();
    }
    let kept = text.chars().take(most.saturating_sub(1));
    kept.chain([CUT]).collect()
}

/// Cuts a text of more than `most` characters at its beginning, and marks it.
fn front_cut(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return text.to_owned();
    }
    let kept = text.chars().skip(count + 1 - most.max(1));
    [CUT].into_iter().chain(kept).collect()
}

/// The style of all drawings: texts, headings and paler texts; the background and boxes; areas `c0` to `c6`, which differ in
/// lightness too; lines by the kind of a link.
const STYLE: &str = "\
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1c2430}\
.head{font-size:18px;font-weight:600}.name{font-size:14px;font-weight:600}.soft{fill:#5b6676}.end{text-anchor:end}\
.bg{fill:#fff}.box{fill:#eef3f9;stroke:#9db0c6}.frame{fill:none;stroke:#8a97a8}circle{fill:#5b6676}\
.c0{fill:#143f73}.c1{fill:#c46f00}.c2{fill:#7db0e2}.c3{fill:#dfe9f5}.c4{fill:#3d9a5f}.c5{fill:#8a63b8}.c6{fill:#8a97a8}\
.part{stroke:#fff;stroke-width:.5}.c2c{stroke:#5c9a2b}.pcie{stroke:#8a93a0}.nvlink{stroke:#b8860b}\n";
const DARK: &str = "text{fill:#e8edf4}.soft{fill:#a3afbf}.bg{fill:#12161c}.box{fill:#1d2631;stroke:#48607a}\
.c0{fill:#9cccff}.c1{fill:#e8a33d}.c2{fill:#3d6ea5}.c3{fill:#26344a}.part{stroke:#12161c}circle{fill:#a3afbf}";

/// A place or a size, in pixels: to the right and down.
pub type Point = (f64, f64);

/// Elements of a drawing, in the order in which they are drawn. Writers add whole elements; writing cannot fail.
#[derive(Clone, Debug, Default)]
pub struct Drawing(String);

impl Drawing {
    /// Adds a text in the classes `class`, unless it is empty.
    pub fn text(&mut self, (x, y): Point, class: &str, content: &str) {
        if !content.is_empty() {
            let content = escape_xml(content);
            let _ = writeln!(
                self.0,
                r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{content}</text>"#
            );
        }
    }

    /// Adds a rectangle. `attributes` has its class and more: `class="box" rx="3"`. A viewer shows `title`, if there is one,
    /// where the pointer is.
    pub fn rect(&mut self, (x, y): Point, (w, h): Point, attributes: &str, title: &str) {
        let title = match title {
            "" => String::new(),
            title => format!("<title>{}</title>", escape_xml(title)),
        };
        let _ = writeln!(
            self.0,
            r#"<rect x="{x:.2}" y="{y:.1}" width="{w:.2}" height="{h:.1}" {attributes}>{title}</rect>"#
        );
    }

    /// Adds a line. `attributes` has its class and more.
    pub fn line(&mut self, (x1, y1): Point, (x2, y2): Point, attributes: &str) {
        let _ = writeln!(
            self.0,
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" {attributes}/>"#
        );
    }

    /// Returns the file, of `width` and `height` pixels.
    pub fn file(self, (width, height): (u64, u64), title: &str) -> String {
        let (title, body) = (escape_xml(title), self.0);
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>{title}</title>
<style>{STYLE}@media (prefers-color-scheme:dark){{{DARK}}}</style>
<rect width="100%" height="100%" class="bg"/>
{body}</svg>
"#
        )
    }
}

impl Write for Drawing {
    fn write_str(&mut self, elements: &str) -> fmt::Result {
        self.0.write_str(elements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_cells_are_cut() {
        let mut table = Table::new(&["NAME", ">SIZE"]);
        let whole = "ä".repeat(MOST);
        table.row([whole.clone(), "1".into()]);
        table.row(["ö".repeat(70_000), "2".repeat(70_000)]);
        let text = table.lines(None);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with(&whole), "{text}");
        assert!(
            lines[2].starts_with(&("ö".repeat(MOST - 1) + "…")),
            "{text}"
        );
        assert_eq!(lines[2].chars().count(), 2 * MOST + 2);
        let whole = ["ö".repeat(70_000), "2".repeat(70_000)];
        table.whole_row(whole.to_vec());
        assert!(table.lines(None).ends_with(&(whole.join("  ") + "\n")));
    }

    #[test]
    fn columns_are_aligned_and_empty_ones_left_out() {
        let mut table = Table::new(&["NAME", ">SIZE", "~NONE", "WHERE"]);
        table.row(["ä", "1", "", "node 0"].map(String::from));
        table.row(["longer", "1000", "", ""].map(String::from));
        assert_eq!(
            table.lines(None),
            "NAME    SIZE  WHERE\nä          1  node 0\nlonger  1000\n"
        );
    }

    #[test]
    fn texts_and_paths_give_way_to_the_widest_line() {
        let mut table = Table::new(&[">SIZE", "~LABEL", "/AT"]);
        let path = format!("/home/{}/train.py:87", "x".repeat(80));
        table.row(["4 KiB".into(), "l".repeat(30), path.clone()]);
        table.row(["4 KiB", "short", "a.py:1"].map(String::from));
        let text = table.lines(Some(40));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1].chars().count(), 40);
        assert!(lines[1].ends_with("x/train.py:87"), "{text}");
        assert!(lines[1].contains("lll…  …"), "{text}");
        assert!(lines[2].contains("short") && lines[2].ends_with("a.py:1"));
        assert!(table.lines(None).contains(&path));
        // Nothing is left that may be cut.
        for most in [0, 1, 5, 20] {
            let text = table.lines(Some(most));
            assert!(
                text.lines().all(|line| line.chars().count() <= most.max(1)),
                "{text}"
            );
        }
    }
}
