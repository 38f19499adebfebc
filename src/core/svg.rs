//! Drawings as SVG: the file around one, and its elements.
//!
//! A drawing needs no font and no style sheet from elsewhere. It is light, and dark where the viewer prefers that. It uses
//! nothing that converters to other formats lack, such as variables.

use std::fmt::{self, Write};

use crate::text::escape_xml;

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
