//! Small charts of the last minutes. Their text is HTML beside the drawing, so that it has the same
//! size on every screen.

use std::fmt::Write as _;

use maud::{Markup, html};

use super::text;
use crate::service::live::HISTORY;

/// Height of a drawing, in its own unit. Its width is one unit for each second.
const HEIGHT: f64 = 100.0;

/// One line of a chart.
pub(super) struct Line {
    pub(super) name: &'static str,
    /// The class of its colour.
    pub(super) class: &'static str,
    /// A value for each second, the newest last.
    pub(super) values: Vec<Option<f64>>,
}

/// A chart. `unit` is the unit of its values.
pub(super) fn chart(title: &str, unit: &str, lines: &[Line]) -> Markup {
    let all = lines.iter().flat_map(|line| line.values.iter().flatten());
    let top = ceiling(all.copied().fold(0.0, f64::max));
    html! {
        figure class="chart" {
            figcaption {
                strong { (title) }
                span class="legend" {
                    @for line in lines {
                        span class=(line.class) { i {} (line.name) }
                    }
                }
            }
            div class="plot" {
                span class="top" { (text::number(top)) " " (unit) }
                svg viewBox={ "0 0 " (HISTORY) " " (HEIGHT) } preserveAspectRatio="none"
                    role="img" aria-label=(title) {
                    @for line in lines {
                        path class=(line.class) d=(path(&line.values, top)) {}
                    }
                }
            }
            div class="axis" { span { (HISTORY / 60) " min ago" } span { "now" } }
        }
    }
}

/// The line; it has gaps where there is no value.
fn path(values: &[Option<f64>], top: f64) -> String {
    let mut path = String::new();
    let start = HISTORY.saturating_sub(values.len());
    let mut is_drawing = false;
    for (at, value) in (start..).zip(values) {
        let Some(value) = value else {
            is_drawing = false;
            continue;
        };
        let y = HEIGHT - (value / top).clamp(0.0, 1.0) * (HEIGHT - 2.0) - 1.0;
        // A point of its own is a line of no length, which a round end makes visible.
        let step = if is_drawing { format!("L{at} {y:.1}") } else { format!("M{at} {y:.1}h0") };
        // Writing to a string does not fail.
        let _ = path.write_str(&step);
        is_drawing = true;
    }
    path
}

/// The least of 1, 2, 5, 10, 20, … that is not below the value, so that the scale seldom changes.
fn ceiling(value: f64) -> f64 {
    if !value.is_finite() || value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= value).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_round() {
        for (value, expected) in
            [(0.0, 1.0), (f64::NAN, 1.0), (0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (730.0, 1_000.0)]
        {
            assert!((ceiling(value) - expected).abs() < 1e-9, "{value}: {}", ceiling(value));
        }
    }

    #[test]
    fn lines_end_at_the_right_and_have_gaps() {
        let drawn = path(&[Some(0.0), Some(10.0), None, Some(5.0)], 10.0);
        assert_eq!(drawn, "M296 99.0h0L297 1.0M299 50.0h0");
        let none = chart("c", "ms", &[Line { name: "l", class: "s0", values: vec![None; 3] }]);
        assert!(!none.into_string().contains("NaN"));
    }
}
