//! Figures as one page that opens offline.

use maud::html;

use super::verdict::Verdict;
use super::{Done, by_reach, tables};
use crate::page::{drawing, page};

/// The page. Everything on it is text or an SVG drawn here; nothing is loaded.
pub fn figures(done: &[Done], is_full: bool, seeds: u64) -> String {
    let form = if is_full { "as in the papers" } else { "in short form" };
    let body = html! {
        h1 { "Published figures, measured again" }
        p.lead {
            "Simulated " (form) ", " (seeds) " seed(s) per point. × marks a reported value."
        }
        @for one in done {
            @let experiment = &one.experiment;
            section {
                h2 { (experiment.id) " · " (experiment.title) }
                p.soft { (experiment.source) }
                p.soft { (one.origin()) }
                @for (_, svg) in one.drawings() { (drawing(svg)) }
                pre { (tables(one, is_full)) (by_reach(one)) }
                table {
                    tr { th { "reported" } th { "measured" } th { "verdict" } }
                    @for claim in &one.claims {
                        tr class=(class(&claim.verdict)) {
                            td { (claim.reported) }
                            td { (claim.measured) }
                            td { (claim.verdict.name()) br; small { (claim.why.as_deref().unwrap_or_default()) } }
                        }
                    }
                }
                @for failure in &one.failures { p.differs { (failure) } }
                @for &at in experiment.values(is_full) {
                    @for command in experiment.commands(at, is_full) {
                        code { (command) " --seeds " (seeds) } br;
                    }
                }
            }
        }
    };
    page("Orthodrome: published figures", &body)
}

fn class(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Agrees => "agrees",
        Verdict::Differs => "differs",
        Verdict::Explained => "explained",
        Verdict::NotRun => "absent",
    }
}
