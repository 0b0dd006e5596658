//! Figures as one page that opens offline.

use super::verdict::Verdict;
use super::{Done, by_reach, tables};
use crate::output;

/// The page. Everything on it is text or an SVG drawn here; nothing is loaded.
pub fn page(done: &[Done], is_full: bool, seeds: u64) -> String {
    let form = if is_full { "as in the papers" } else { "in short form" };
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>Orthodrome: published figures</title><style>{STYLE}</style></head><body>\
         <h1>Published figures, measured again</h1>\
         <p>Simulated {form}, {seeds} seed(s) a point, commit {}. × marks what was reported.</p>",
        escaped(output::COMMIT)
    );
    for one in done {
        let experiment = &one.experiment;
        page.push_str(&format!(
            "<section><h2>{} · {}</h2><p>{}</p><figure>{}</figure>{}<pre>{}{}</pre>",
            escaped(&experiment.id),
            escaped(&experiment.title),
            escaped(&experiment.source),
            one.svg,
            one.distributions
                .iter()
                .map(|svg| format!("<figure>{svg}</figure>"))
                .collect::<String>(),
            escaped(&tables(one, is_full)),
            escaped(&by_reach(one)),
        ));
        page.push_str("<table><tr><th>reported</th><th>measured</th><th>verdict</th></tr>");
        for claim in &one.claims {
            let class = match claim.verdict {
                Verdict::Agrees => "agrees",
                Verdict::Differs => "differs",
                Verdict::Explained => "explained",
                Verdict::NotRun => "absent",
            };
            let why = claim.why.as_deref().unwrap_or_default();
            page.push_str(&format!(
                "<tr class=\"{class}\"><td>{}</td><td>{}</td><td>{}<br><small>{}</small></td></tr>",
                escaped(&claim.reported),
                escaped(&claim.measured),
                claim.verdict.name(),
                escaped(why)
            ));
        }
        page.push_str("</table>");
        for failure in &one.failures {
            page.push_str(&format!("<p class=\"differs\">{}</p>", escaped(failure)));
        }
        for &at in experiment.values(is_full) {
            for command in experiment.commands(at, is_full) {
                let command = format!("{command} --seeds {seeds}");
                page.push_str(&format!("<code>{}</code><br>", escaped(&command)));
            }
        }
        page.push_str("</section>");
    }
    page.push_str("</body></html>\n");
    page
}

const STYLE: &str = "\
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;\
color:#222;background:#fff}figure{margin:1rem 0}svg{max-width:100%;height:auto;background:#fff}\
pre,code{font-size:.8rem}pre{overflow-x:auto}table{border-collapse:collapse;margin:1rem 0}\
td,th{border-bottom:1px solid #ccc;padding:.3rem .8rem;text-align:left;vertical-align:top}\
.agrees td:last-child{color:#17692f}.differs td:last-child,p.differs{color:#b3261e;font-weight:600}\
.explained td:last-child{color:#7a5200}.absent{color:#888}\
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181a1b}td,th{border-color:#444}\
.agrees td:last-child{color:#7bd88f}.differs td:last-child,p.differs{color:#ff8a80}\
.explained td:last-child{color:#ffc46b}}";

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(escaped("<a b=\"&\">"), "&lt;a b=&quot;&amp;&quot;&gt;");
    }
}
