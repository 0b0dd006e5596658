//! What pages for people have in common: they open offline, in light and dark, and print.

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// A page. Nothing in it is loaded from elsewhere.
pub fn page(title: &str, body: &Markup) -> String {
    let colors: String = (0..SERIES).map(color).collect();
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width";
                title { (title) }
                style { (PreEscaped(STYLE)) ":root{" (PreEscaped(colors)) "}" }
            }
            body { (body) }
        }
    };
    page.into_string()
}

/// A drawing that this program made.
pub fn drawing(svg: &str) -> Markup {
    html! { figure { (PreEscaped(svg)) } }
}

/// How many systems have colours of their own; those of more repeat.
const SERIES: usize = 24;

/// The colour of a system: hues are apart by the golden angle, so that any first few differ.
fn color(series: usize) -> String {
    let hue = (25.0 + 137.508 * series as f64) % 360.0;
    format!("--s{series}:oklch(var(--light) .16 {hue:.0});")
}

const STYLE: &str = include_str!("page.css");
