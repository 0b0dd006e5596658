//! Results of runs in a folder, so that an interrupted sweep can resume.
//!
//! Each figure has one file, `ID.jsonl`, with one line for each run. A line is complete when it
//! ends with a line break. An incomplete last line, which a killed process leaves, is skipped, and
//! removed before the next line is written.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use orthodrome_core::ordered::OrdMap;

use anyhow::Context as _;
use orthodrome_eval::metrics::OfKind;
use serde::{Deserialize, Serialize};

use crate::compare;
use crate::output;

/// The results of a run that figures need.
#[derive(Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Every column of `compare`, by name; columns that are NaN are left out.
    columns: OrdMap<String, f64>,
    /// Latencies by the distance of the data; empty if transactions do not differ in it.
    #[serde(default, skip_serializing_if = "OrdMap::is_empty")]
    pub kinds: OrdMap<String, OfKind>,
    /// Requests that committed.
    pub committed: u64,
    /// Requests that had not ended when the run did.
    pub outstanding: u32,
    /// Whether the workload's audit of the database held at the end; null if it has none.
    pub audited: Option<bool>,
    /// The promise that the run broke.
    pub failure: Option<String>,
    /// Real time that the run took.
    pub wall_seconds: f64,
}

impl Outcome {
    /// The part of a run's result that is kept.
    pub fn new(run: &compare::Run) -> Self {
        let value = |column: &compare::Column| (column.0.to_owned(), (column.2)(run));
        let is_number = |(_, value): &(String, f64)| value.is_finite();
        let result = &run.result;
        Self {
            columns: compare::columns().map(value).filter(is_number).collect(),
            kinds: if result.kinds.len() > 1 { result.kinds.clone() } else { OrdMap::new() },
            committed: result.committed,
            outstanding: run.outstanding,
            audited: run.audited,
            failure: run.failure.clone(),
            wall_seconds: result.wall_seconds,
        }
    }

    /// The column called `name`; NaN if the run has none.
    pub fn column(&self, name: &str) -> f64 {
        self.columns.get(name).copied().unwrap_or(f64::NAN)
    }
}

/// The key of a run: everything that its result depends on, except the commit.
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

/// A run and its commit.
#[derive(Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The commit of the program that executed the run.
    pub commit: String,
    /// The key of the run.
    pub run: Key,
    /// The result of the run.
    pub outcome: Outcome,
}

/// The kept runs of one figure.
pub struct Kept {
    path: PathBuf,
    /// The file; none if results are not written.
    file: Option<File>,
    entries: OrdMap<Key, Entry>,
}

impl Kept {
    /// Opens the kept runs of a figure in `folder`, for reading and, unless `is_read_only`, for
    /// writing. They are the runs of this program's commit. With `any_commit`, a run that this
    /// commit lacks is taken from the last other commit.
    ///
    /// # Errors
    /// The file cannot be read or written, has another format, or another process writes to it.
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
        let mut entries: OrdMap<Key, Entry> = OrdMap::new();
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

    /// An empty collection that writes nothing.
    pub fn nothing() -> Self {
        Self { path: PathBuf::new(), file: None, entries: OrdMap::new() }
    }

    /// The result of a run, if it is kept.
    pub fn get(&self, run: &Key) -> Option<&Entry> {
        self.entries.get(run)
    }

    /// Adds the result of a run. If results are written, it is on disk when this returns.
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
