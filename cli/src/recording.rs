//! Files that a simulation writes while it runs: histories and traces.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::Context as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_eval::diagram;
use orthodrome_eval::history::Writer;
use orthodrome_sim::load::HistorySink;
use orthodrome_sim::simulation::TraceSink;

use crate::output;

/// A file that a simulation writes to. The first failure is kept until the end, because the
/// simulator cannot handle it.
#[derive(Clone)]
pub struct Recording(Rc<RefCell<Inner>>);

struct Inner {
    path: PathBuf,
    file: BufWriter<File>,
    error: Option<io::Error>,
}

impl Recording {
    /// Creates the file, or empties it.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let file = File::create(path)
            .with_context(|| format!("{}: cannot write the file", path.display()))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        Ok(Self(Rc::new(RefCell::new(Inner { path: path.into(), file, error: None }))))
    }

    /// A sink for the history of a simulation.
    pub fn history_sink(&self) -> HistorySink {
        let recording = self.clone();
        Box::new(move |entry| recording.write(|file| Writer::new(file).write(&entry)))
    }

    /// A sink for the trace of a simulation of `cluster`. The file begins with comments that
    /// contain the command that repeats the run, and the places of the nodes.
    pub fn trace_sink(&self, command: &str, cluster: &Cluster) -> TraceSink {
        let command = command.replace(['\n', '\r'], " ");
        let places = diagram::places(cluster);
        let head = format!("# orthodrome {command}\n# commit {}\n{places}", output::COMMIT);
        self.write(|file| file.write_all(head.as_bytes()));
        let recording = self.clone();
        Box::new(move |line| recording.write(|file| writeln!(file, "{line}")))
    }

    fn write(&self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        let inner = &mut *self.0.borrow_mut();
        if inner.error.is_none() {
            inner.error = write(&mut inner.file).err();
        }
    }

    /// Writes the rest of the file.
    pub fn finish(&self) -> anyhow::Result<()> {
        self.write(BufWriter::flush);
        let inner = &mut *self.0.borrow_mut();
        match inner.error.take() {
            Some(error) => Err(error)
                .with_context(|| format!("{}: cannot write the file", inner.path.display())),
            None => Ok(()),
        }
    }
}
