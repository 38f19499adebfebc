//! Invariants of all pictures, for any input.

use super::*;

fn line(points: &[(f64, f64)]) -> Line {
    Line {
        name: "a<b>&c".to_owned(),
        points: points.to_vec(),
    }
}

const AREA: Area = Area {
    left: 100.0,
    top: 80.0,
    width: 400.0,
    height: 200.0,
};

#[test]
fn values_go_from_end_to_end() {
    let axis = Axis::of("", [250.0, 1000.0, 250.0].into_iter(), false);
    assert_eq!((axis.place(0.0), axis.place(1000.0)), (0.0, 1.0));
    assert_eq!((axis.place(250.0), axis.place(9999.0)), (0.25, 1.0));
    let names: Vec<&str> = axis.ticks.iter().map(|tick| tick.1.as_str()).collect();
    assert_eq!(names, ["250", "1000"]);
    let decades = Axis::of("", [0.0, 20.0, 30_000.0].into_iter(), true).rounded();
    assert_eq!((decades.low, decades.high), (10.0, 100_000.0));
    assert_eq!(decades.ticks[4], (100_000.0, "100 k".to_owned()));
    assert!((decades.place(1000.0) - 0.5).abs() < 1e-9);
}

#[test]
fn a_line_is_drawn_where_its_points_are() {
    let points = [(0.0, 0.0), (1.0, 50.0), (2.0, 100.0)];
    let mut chart = Chart::measured(
        "title".to_owned(),
        ("across", false),
        ("up", false),
        vec![line(&points)],
    );
    chart.up.high = 100.0;
    let drawn = |chart: &Chart| {
        let mut picture = Picture::new(900.0, 400.0, "", "", "");
        chart.draw(&mut picture, AREA);
        picture.finish()
    };
    let svg = drawn(&chart);
    assert!(svg.contains("M100.0 280.0L300.0 180.0L500.0 80.0"), "{svg}");
    assert_eq!(svg.matches("<circle ").count(), 3);
    chart.shape = Shape::Steps;
    chart.filled = Some(line(&points[1..]));
    let svg = drawn(&chart);
    assert!(svg.contains("M100.0 280.0V280.0H100.0V180.0H300.0V80.0H500.0\""));
    assert!(svg.contains("M100.0 280.0V180.0H300.0V80.0H500.0V280.0H100.0z\""));
    assert!(!svg.contains("<circle "));
}

#[test]
fn the_longest_bar_ends_before_its_text_and_the_shortest_can_be_seen() {
    let bars = |logarithmic| {
        let bar = |(index, value)| Bar {
            name: format!("<{index}>"),
            value,
            text: format!("{value}"),
            index,
        };
        Bars {
            title: "ns".to_owned(),
            logarithmic,
            bars: [0.0, 10.0, 1000.0]
                .into_iter()
                .enumerate()
                .map(bar)
                .collect(),
        }
    };
    for logarithmic in [false, true] {
        let mut picture = Picture::new(900.0, 400.0, "", "", "");
        bars(logarithmic).draw(&mut picture, 20.0, 80.0, 400.0);
        let svg = picture.finish();
        let widths: Vec<f64> = svg
            .split("<rect x=\"156.0\"")
            .skip(1)
            .filter_map(|rest| {
                rest.split("width=\"")
                    .nth(1)?
                    .split('"')
                    .next()?
                    .parse()
                    .ok()
            })
            .collect();
        assert_eq!(widths.len(), 3, "{svg}");
        assert!(
            widths.is_sorted() && widths[0] >= 1.0 && widths[2] == 192.0,
            "{widths:?}"
        );
    }
}

#[test]
fn nothing_at_all_is_a_picture_too() {
    for logarithmic in [false, true] {
        let axis = ("", logarithmic);
        for lines in [vec![], vec![line(&[])], vec![line(&[(0.0, 0.0)])]] {
            let mut picture = Picture::new(900.0, 400.0, "t", "", "");
            Chart::measured(String::new(), axis, axis, lines).draw(&mut picture, AREA);
            let bars = Bars {
                title: String::new(),
                logarithmic,
                bars: Vec::new(),
            };
            bars.draw(&mut picture, 0.0, 0.0, 400.0);
            let svg = picture.finish();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}

#[test]
fn names_cannot_break_the_picture() {
    let mut picture = Picture::new(900.0, 400.0, "<t>", "\u{202e}&", "\"w\"");
    let named = Chart::measured(
        "<c>".to_owned(),
        ("<x>", false),
        ("<y>", false),
        vec![line(&[])],
    );
    named.draw(&mut picture, AREA);
    let svg = picture.finish();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("<title>&lt;t&gt;</title>\n<desc>&quot;w&quot;</desc>"));
    assert!(svg.contains(">a&lt;b&gt;&amp;c</text>"));
    for mark in ["<t>", "<c>", "<x>", "<y>", "\u{202e}"] {
        assert!(!svg.contains(mark), "{mark}");
    }
}
