//! The elements of the drawing.

use std::fmt::Write;

use crate::svg::Drawing;

/// The width of a character of the small font, rounded up.
const CHAR: f64 = 6.9;

/// Draws a text for each row (distance from `y`, class, text), shortened to `width`.
pub(super) fn texts(
    out: &mut Drawing,
    (x, y): (f64, f64),
    width: f64,
    rows: &[(f64, &str, String)],
) {
    for (down, class, content) in rows {
        out.text((x, y + down), class, &fit(content, width));
    }
}

/// Draws a rectangle with round corners; `class` may have further attributes behind it.
pub(super) fn rect(out: &mut Drawing, (x, y): (f64, f64), (w, h): (f64, f64), r: u32, class: &str) {
    let _ = writeln!(
        out,
        r#"<rect x="{x:.1}" y="{y:.1}" width="{w:.1}" height="{h:.1}" rx="{r}" class={class}/>"#
    );
}

/// Draws a line; `class` has further attributes behind it.
pub(super) fn line(out: &mut Drawing, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
    let _ = writeln!(
        out,
        r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class={class}/>"#
    );
}

/// Returns the text, shortened with an ellipsis if it would be wider than `width`.
fn fit(text: &str, width: f64) -> String {
    let most = (width / CHAR).max(1.0) as usize;
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_to_its_width() {
        assert_eq!(fit("0-71", 100.0), "0-71");
        assert_eq!(fit("0,2,4,6,8,10,12,14,16", 70.0), "0,2,4,6,8…");
        assert_eq!(fit("long", 0.0), "…");
    }
}
