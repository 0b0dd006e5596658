//! Writes figures as a page of the repository, with their plots beside it.

use std::fs;
use std::path::Path;

use anyhow::Context as _;

use super::figure::{Done, form};
use super::ids::IDS;
use super::verdict::Verdict;
use super::{Args, BY_REACH, figures, reaches, remarks, write_plots};

/// Writes `reproduction.md` and `plots/` into a folder.
///
/// # Errors
/// It cannot be written to.
pub fn write(args: &Args, done: &[Done], folder: &Path) -> anyhow::Result<()> {
    let plots = folder.join("plots");
    fs::create_dir_all(&plots).with_context(|| plots.display().to_string())?;
    for one in done {
        write_plots(one, &plots)?;
    }
    let path = folder.join("reproduction.md");
    fs::write(&path, document(args, done)).with_context(|| path.display().to_string())
}

const HEAD: &str = "\
# Published figures, measured again (simulated)

`orthodrome reproduce all --keep RUNS --docs docs` writes this document; do not edit it. Each figure is a file in `experiments/`: the options of
`compare`, the option that varies, and the claims of the paper. A figure is reproduced when the order of the systems, the crossover points and
the ratios agree. Milliseconds should agree within 10 % where round trips dominate; where processors dominate they depend on the authors' hardware.
No protocol and no model was adapted to match a paper. `docs/comparison.md` has the long explanations.

*Agrees*: the measured value is within the tolerance of the claim (10 % unless its file says otherwise). *Explained*: it is not, and the file gives
the cause and, if there is one, the run that shows it. *Not run*: the short form does not have the value, or nobody has run it. Short forms have
fewer points, shorter runs and one seed; `orthodrome reproduce ID --full` is as long as in the paper.

";

fn document(args: &Args, done: &[Done]) -> String {
    let mut text = HEAD.to_owned();
    let header = [
        "id",
        "figure",
        "what it shows",
        "form",
        "commit",
        "agrees",
        "explained",
        "differs",
        "not run",
        "plot",
    ];
    let ordered: Vec<&Done> =
        IDS.iter().flat_map(|id| done.iter().filter(|one| id.has(&one.experiment.id))).collect();
    let rows: Vec<Vec<String>> = ordered.iter().map(|one| row(args, one)).collect();
    let all = |verdict| ordered.iter().map(|one| count(one, verdict)).sum::<usize>();
    text.push_str(&table(&header, &rows));
    text.push_str(&format!(
        "\n{} claims: {} agree, {} differ and are explained, {} differ, {} were not run.\n",
        ordered.iter().map(|one| one.claims.len()).sum::<usize>(),
        all(Verdict::Agrees),
        all(Verdict::Explained),
        all(Verdict::Differs),
        all(Verdict::NotRun),
    ));
    for one in ordered {
        text.push_str(&section(args, one));
    }
    text
}

fn count(done: &Done, verdict: Verdict) -> usize {
    done.claims.iter().filter(|claim| claim.verdict == verdict).count()
}

fn row(args: &Args, done: &Done) -> Vec<String> {
    let experiment = &done.experiment;
    let id = &experiment.id;
    let is_run = done.runs() > 0;
    let verdicts = [Verdict::Agrees, Verdict::Explained, Verdict::Differs, Verdict::NotRun];
    let mut row = vec![
        format!("[{id}](#{})", anchor(done)),
        experiment.source.clone(),
        experiment.title.clone(),
        if is_run { form(args, experiment) } else { "not run".into() },
        done.commits.iter().cloned().collect::<Vec<_>>().join(", "),
    ];
    row.extend(verdicts.map(|verdict| match count(done, verdict) {
        0 => String::new(),
        count => count.to_string(),
    }));
    let plots = done.drawings().into_iter().map(|(name, _)| {
        let what = if name.contains("-cdf") { "distribution" } else { "plot" };
        format!("[{what}](plots/{name})")
    });
    row.push(plots.collect::<Vec<_>>().join(", "));
    row
}

fn anchor(done: &Done) -> String {
    done.experiment.id.to_lowercase()
}

fn section(args: &Args, done: &Done) -> String {
    let experiment = &done.experiment;
    let mut text = format!("\n## {}\n\n{}. {}", experiment.id, experiment.source, experiment.title);
    if done.runs() == 0 {
        text.push_str(".\n\nIt has not been run.\n");
    } else {
        text.push_str(&format!(
            ". {}; {} runs, {:.0} s of computing, {}.\n\n",
            capital(&form(args, experiment)),
            done.runs(),
            done.wall_seconds,
            done.origin(),
        ));
        for (name, _) in done.drawings() {
            text.push_str(&format!("![{}](plots/{name})\n\n", experiment.title));
        }
        for column in experiment.columns() {
            let (header, rows) = figures(done, column, args.full);
            let header: Vec<&str> = header.iter().map(String::as_str).collect();
            text.push_str(&format!("{column} by {}:\n\n", experiment.sweep.label));
            text.push_str(&format!("{}\n", table(&header, &rows)));
        }
        let (header, rows) = reaches(done);
        if !rows.is_empty() {
            text.push_str(&format!("{}:\n\n{}\n", capital(BY_REACH), table(&header, &rows)));
        }
        for remark in remarks(done) {
            text.push_str(&format!("- {remark}\n"));
        }
    }
    let claims = done.claims.iter().map(|claim| {
        let verdict = match &claim.why {
            Some(why) => format!("{}: {why}", claim.verdict.name()),
            None => claim.verdict.name().to_owned(),
        };
        vec![claim.reported.clone(), claim.measured.clone(), verdict]
    });
    let claims: Vec<Vec<String>> = claims.collect();
    if !claims.is_empty() {
        text.push_str(&format!("\n{}\n", table(&["reported", "measured", "verdict"], &claims)));
    }
    let form = if args.full { " --full" } else { "" };
    text.push_str(&format!(
        "\n`orthodrome reproduce {}{form} --seeds {}`",
        experiment.id, args.seeds
    ));
    if let Some(&at) = experiment.values(args.full).first() {
        text.push_str("; one point alone:\n\n");
        for command in experiment.commands(at, args.full) {
            text.push_str(&format!("    {command}\n"));
        }
    }
    text
}

/// A text with a capital first letter.
fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect()
}

/// A Markdown table. The first column is left-aligned, and so are others unless they contain
/// figures.
fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let cell = |text: &str| text.replace('|', "\\|").replace('<', "&lt;");
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let is_figure = |text: &str| !text.chars().any(|letter| letter.is_alphabetic());
    let rule = (0..header.len()).map(|at| {
        let mut cells = rows.iter().filter_map(|row| row.get(at));
        if cells.all(|text| is_figure(text)) { "---:".to_owned() } else { "---".to_owned() }
    });
    let mut text = line(header.iter().map(|text| cell(text)).collect());
    text.push_str(&line(rule.collect()));
    for row in rows {
        text.push_str(&line(row.iter().map(|text| cell(text)).collect()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::experiment::Experiment;
    use super::super::figure::carry_out;
    use super::super::tests::parsed;
    use super::*;

    /// The page with every figure, from a folder that has runs of C4 only.
    fn rendered(folder: &Path) -> String {
        let keep = folder.display().to_string();
        let args = parsed(&["all", "--keep", &keep, "--no-runs", "--any-commit"]);
        let done = Experiment::all().unwrap().into_iter().map(|one| carry_out(&args, one).unwrap());
        let done: Vec<Done> = done.collect();
        let docs = folder.join("docs");
        write(&args, &done, &docs).unwrap();
        let plot = fs::read_to_string(docs.join("plots/C4.svg")).unwrap();
        assert_eq!(fs::read_dir(docs.join("plots")).unwrap().count(), 1);
        fs::read_to_string(docs.join("reproduction.md")).unwrap() + &plot
    }

    #[test]
    fn the_document_has_every_figure_and_comes_out_the_same_again() {
        let folder = tempfile::tempdir().unwrap();
        let experiment = Experiment::all().unwrap().into_iter().find(|one| one.id == "C4").unwrap();
        let line = |(protocol, p50): (&&str, f64)| {
            let run = experiment.run(protocol, 200.0, false, 1);
            let outcome = format!(
                "{{\"columns\":{{\"p50 ms\":{p50}}},\"committed\":9,\"outstanding\":1,\"audited\":null,\
                 \"failure\":null,\"wall_seconds\":2.5}}"
            );
            let run = serde_json::to_string(&run).unwrap();
            format!("{{\"commit\":\"0123abcd\",\"run\":{run},\"outcome\":{outcome}}}\n")
        };
        let protocols = experiment.protocols().0;
        let lines: String = protocols.iter().zip([290.0, 240.5, 200.0]).map(line).collect();
        fs::write(folder.path().join("C4.jsonl"), lines).unwrap();

        let text = rendered(folder.path());
        for id in IDS {
            let row = |line: &str| line.starts_with(&format!("| [{}](#", id.name));
            assert!(text.lines().any(row), "{} has no row", id.name);
        }
        for part in [
            "| 0123abcd | 2 | 1 |",
            "| carousel-fast | 240.5 |",
            "![Retwis on ec2-5 at 200 a second](plots/C4.svg)",
            "| tapir at 200: 334 | 200 (-40.1 %) | differs, explained: Half of Retwis",
            "- tapir at 200: 10 % of the requests were still pending",
            "It has not been run.",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(rendered(folder.path()), text);
    }
}
