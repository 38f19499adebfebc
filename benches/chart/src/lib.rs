//! Charts as SVG pictures: lines over axes, and bars.
//!
//! A [`Picture`] has a title; [`Chart`] and [`Bars`] draw into it. Lengths are pixels.

mod axis;
mod bars;
mod lines;

use std::fmt::Write;

use egmem::text::escape_xml;

pub use axis::Axis;
pub use bars::{Bar, Bars};
pub use lines::{Area, Chart, Line, Shape};

/// Colours that most readers can tell apart, each with a dash.
///
/// Source of the colours: Okabe and Ito, "Color Universal Design", 2008.
const STYLES: [(&str, &str); 8] = [
    ("#0072b2", ""),
    ("#d55e00", "7 3"),
    ("#009e73", "2 3"),
    ("#cc79a7", "9 3 2 3"),
    ("#e69f00", "4 2"),
    ("#56b4e9", "12 4"),
    ("#7f6000", "1 2"),
    ("#555555", "6 2 1 2 1 2"),
];

/// The colour and the dash of contestant `index`; they repeat after eight.
fn style(index: usize) -> (&'static str, &'static str) {
    STYLES[index % STYLES.len()]
}

const BOLD: &str = r#"font-weight="bold""#;
const SOFT: &str = r##"fill="#555""##;
const MIDDLE: &str = r#"text-anchor="middle""#;
const END: &str = r#"text-anchor="end""#;

/// Adds a line to a picture.
macro_rules! put {
    ($picture:expr, $line:literal) => {
        // Writing to a String cannot fail.
        let _ = writeln!($picture.svg, $line);
    };
}
use put;

/// An SVG file that is being written.
pub struct Picture {
    svg: String,
}

impl Picture {
    /// Where a picture's own head ends.
    pub const HEAD: f64 = 64.0;

    /// Starts a picture with `title` in its head, `about` below it and `words` for screen readers.
    pub fn new(width: f64, height: f64, title: &str, about: &str, words: &str) -> Self {
        let mut picture = Self { svg: String::new() };
        let [heading, words] = [title, words].map(escape_xml);
        put!(
            picture,
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12" fill="#222">
<title>{heading}</title>
<desc>{words}</desc>
<rect width="{width}" height="{height}" fill="#fff"/>"##
        );
        picture.text(24.0, 32.0, r#"font-size="17" font-weight="bold""#, title);
        picture.text(24.0, 52.0, SOFT, about);
        picture
    }

    /// Returns the file.
    pub fn finish(mut self) -> String {
        self.svg.push_str("</svg>\n");
        self.svg
    }

    fn path(&mut self, way: &str, attributes: &str) {
        put!(self, r#"<path d="{way}" {attributes}/>"#);
    }

    fn text(&mut self, x: f64, y: f64, attributes: &str, text: &str) {
        if !text.is_empty() {
            let text = escape_xml(text);
            put!(
                self,
                r#"<text x="{x:.1}" y="{y:.1}" {attributes}>{text}</text>"#
            );
        }
    }
}

#[cfg(test)]
mod tests;
