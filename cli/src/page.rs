//! The common parts of HTML pages. Pages work offline, in light and dark mode, and when printed.

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// An HTML page. It loads nothing from elsewhere.
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

/// An SVG drawing of this program as markup.
pub fn drawing(svg: &str) -> Markup {
    html! { figure { (PreEscaped(svg)) } }
}

/// Number of different colours; with more systems, colours repeat.
const SERIES: usize = 24;

/// The colour of a system. Hues differ by the golden angle, so that the first few are always
/// distinct.
fn color(series: usize) -> String {
    let hue = (25.0 + 137.508 * series as f64) % 360.0;
    format!("--s{series}:oklch(var(--light) .16 {hue:.0});")
}

const STYLE: &str = include_str!("page.css");
