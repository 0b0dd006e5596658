//! `check`: checks a history against a consistency model.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use orthodrome_eval::checker::{self, Model, Verdict};
use orthodrome_eval::history::{History, ReadError};
use serde::Serialize;

use crate::{Status, output};

/// Check a history: is there a serial order of its transactions that explains all their reads?
#[derive(clap::Args)]
#[command(after_help = "\
A history is a file with one JSON object on each line; `sim --history`, `demo` and `load` write such
files. An anomaly is shown as a shortest cycle of transactions: each must come before the next, and
the output says why.

Examples:
  orthodrome check history.jsonl
  orthodrome check history.jsonl --model serializable --json

Exit status: 0 the history passed, 1 it has an anomaly, 2 it cannot be read.")]
pub struct Args {
    /// History file (JSON lines)
    #[arg(value_name = "HISTORY")]
    history: PathBuf,
    /// Consistency model: strict-serializable (the serial order must also agree with real time, and
    /// clients see their own commits) or serializable
    #[arg(long, value_name = "MODEL", default_value = "strict-serializable")]
    model: Model,
    /// Print the verdict as one JSON object
    #[arg(long)]
    json: bool,
}

/// The verdict as `--json` prints it.
#[derive(Serialize)]
struct Printed<'a> {
    history: String,
    #[serde(flatten)]
    verdict: &'a Verdict,
    commit: &'static str,
}

/// Checks the history and prints the verdict.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let verdict = judge(&args.history, args.model)?;
    let history = args.history.display().to_string();
    if args.json {
        output::print_json(&Printed { history, verdict: &verdict, commit: output::COMMIT })?;
    } else {
        output::print(&format!("{history}: {verdict}"))?;
    }
    Ok(if verdict.ok { Status::Passed } else { Status::Failed })
}

/// Reads a history from a file and checks it.
pub fn judge(path: &Path, model: Model) -> anyhow::Result<Verdict> {
    let place = path.display();
    let history = read(path)?;
    if history.is_empty() {
        bail!(
            "{place}: the history has no transactions; give a history of a run that submitted some"
        );
    }
    let bar = output::progress(None, "{spinner} checking {msg} transactions; {elapsed}")?;
    bar.set_message(output::count(history.len() as u64));
    let verdict = checker::check(&history, model);
    bar.finish_and_clear();
    Ok(verdict)
}

fn read(path: &Path) -> anyhow::Result<History> {
    let place = path.display();
    let file = File::open(path).with_context(|| format!("{place}: cannot open the history"))?;
    let size = file.metadata().with_context(|| format!("{place}"))?.len();
    let bar = output::progress(
        Some(size),
        "reading {bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}",
    )?;
    let history = History::read(BufReader::with_capacity(1 << 20, bar.wrap_read(file)));
    bar.finish_and_clear();
    history.map_err(|error| match error {
        ReadError::Form { line, form } => anyhow!("{place}:{line}: {form}"),
        ReadError::Io { line, source } => {
            anyhow!("{place}:{line}: cannot read the history: {source}")
        }
    })
}
