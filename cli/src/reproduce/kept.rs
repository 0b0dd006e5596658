//! Runs that have ended, kept in a folder: a sweep that was interrupted goes on where it was.
//!
//! Each figure has one file, `ID.jsonl`, with one line for each run. A line is whole once it ends with a line break; what a
//! killed process left of its last one is passed over, and cut off before the next is written.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use orthodrome_eval::metrics::OfKind;
use serde::{Deserialize, Serialize};

use crate::compare;
use crate::output;

/// What figures need of a run.
#[derive(Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Every column of `compare`, by name; those without a number are absent.
    columns: BTreeMap<String, f64>,
    /// Latencies by how far transactions reach; where they differ in that.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kinds: BTreeMap<String, OfKind>,
    /// Requests that committed.
    pub committed: u64,
    /// Requests that had not ended when the run did.
    pub outstanding: u32,
    /// Whether the workload's audit of the database held at the end; null if it has none.
    pub audited: Option<bool>,
    /// The promise that the run broke.
    pub failure: Option<String>,
    /// How long it took.
    pub wall_seconds: f64,
}

impl Outcome {
    /// What is kept of a run.
    pub fn new(run: &compare::Run) -> Self {
        let value = |column: &compare::Column| (column.0.to_owned(), (column.2)(run));
        let is_number = |(_, value): &(String, f64)| value.is_finite();
        let result = &run.result;
        Self {
            columns: compare::columns().map(value).filter(is_number).collect(),
            kinds: if result.kinds.len() > 1 { result.kinds.clone() } else { BTreeMap::new() },
            committed: result.committed,
            outstanding: run.outstanding,
            audited: run.audited,
            failure: run.failure.clone(),
            wall_seconds: result.wall_seconds,
        }
    }

    /// The column called `name`; not a number if the run has none.
    pub fn column(&self, name: &str) -> f64 {
        self.columns.get(name).copied().unwrap_or(f64::NAN)
    }
}

/// Which run it is: what decides its result, but for the commit.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// The protocol.
    pub protocol: String,
    /// The other arguments of `orthodrome compare`.
    pub options: Vec<String>,
    /// The seed.
    pub seed: u64,
}

/// A run and the commit it is of.
#[derive(Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The commit of the program that ran it.
    pub commit: String,
    /// Which run.
    pub run: Key,
    /// What came of it.
    pub outcome: Outcome,
}

/// The kept runs of one figure.
pub struct Kept {
    path: PathBuf,
    /// None if nothing is written.
    file: Option<File>,
    entries: BTreeMap<Key, Entry>,
}

impl Kept {
    /// What is kept of a figure in `folder`, to be read and, unless `is_read_only`, added to: those of this program's commit,
    /// and with `any_commit`, where there is none of this commit, the last that was kept.
    ///
    /// # Errors
    /// The file cannot be read or written, is not one of these, or another process is adding to it.
    pub fn open(
        folder: &Path,
        id: &str,
        any_commit: bool,
        is_read_only: bool,
    ) -> anyhow::Result<Self> {
        let path = folder.join(format!("{id}.jsonl"));
        let place = || format!("--keep: {}", path.display());
        let file = if is_read_only {
            None
        } else {
            fs::create_dir_all(folder).with_context(place)?;
            let mut options = OpenOptions::new();
            let file = options.create(true).append(true).open(&path).with_context(place)?;
            file.try_lock().with_context(|| {
                format!(
                    "--keep: another process writes to {}; wait for it, or use another folder",
                    path.display()
                )
            })?;
            Some(file)
        };
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.with_context(place)?,
        };
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let (lines, torn) = text.split_at(whole);
        if !torn.is_empty() {
            note!("warning: {}: the last line is incomplete; ignored", path.display());
            if let Some(file) = &file {
                file.set_len(whole as u64).with_context(place)?;
            }
        }
        let mut entries: BTreeMap<Key, Entry> = BTreeMap::new();
        let lines = lines.split(|&byte| byte == b'\n').enumerate();
        for (at, line) in lines.filter(|(_, line)| !line.is_empty()) {
            let entry: Entry = serde_json::from_slice(line).with_context(|| {
                format!("{}:{}: not a kept run; remove the line", path.display(), at + 1)
            })?;
            let is_own = entry.commit == output::COMMIT;
            let has_own =
                entries.get(&entry.run).is_some_and(|known| known.commit == output::COMMIT);
            if is_own || (any_commit && !has_own) {
                entries.insert(entry.run.clone(), entry);
            }
        }
        Ok(Self { path, file, entries })
    }

    /// Nothing is kept.
    pub fn nothing() -> Self {
        Self { path: PathBuf::new(), file: None, entries: BTreeMap::new() }
    }

    /// A run, if it is there.
    pub fn get(&self, run: &Key) -> Option<&Entry> {
        self.entries.get(run)
    }

    /// Adds a run that has just ended. Where runs are kept it is on the disk when this returns.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add(&mut self, run: Key, outcome: Outcome) -> anyhow::Result<()> {
        let entry = Entry { commit: output::COMMIT.to_owned(), run, outcome };
        if let Some(file) = &mut self.file {
            let mut line = serde_json::to_vec(&entry)?;
            line.push(b'\n');
            let written = file.write_all(&line).and_then(|()| file.sync_data());
            written.with_context(|| format!("--keep: {}", self.path.display()))?;
        }
        self.entries.insert(entry.run.clone(), entry);
        Ok(())
    }
}
