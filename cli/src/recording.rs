//! Files that a simulation writes while it runs: histories and traces.

use std::cell::RefCell;
use std::collections::VecDeque;
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
    ends: Option<Ends>,
}

/// The beginning and the end of a trace, each with at most `most` bytes.
struct Ends {
    most: usize,
    /// Bytes of the beginning so far.
    begun: usize,
    /// The last lines, which have so many bytes.
    last: VecDeque<String>,
    bytes: usize,
    /// How many lines between beginning and end were dropped.
    dropped: u64,
}

impl Ends {
    fn new(most: usize) -> Self {
        Self { most, begun: 0, last: VecDeque::new(), bytes: 0, dropped: 0 }
    }

    /// Returns the line if it is part of the beginning.
    fn add(&mut self, line: String) -> Option<String> {
        if self.last.is_empty() && self.begun + line.len() <= self.most {
            self.begun += line.len();
            return Some(line);
        }
        self.bytes += line.len();
        self.last.push_back(line);
        while self.bytes > self.most
            && let Some(first) = self.last.pop_front()
        {
            self.bytes -= first.len();
            self.dropped += 1;
        }
        None
    }
}

impl Recording {
    /// Creates the file, or empties it.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        Self::open(path, None)
    }

    /// The same for a trace of which only the beginning and the end are kept, each with at most
    /// `most` bytes. A run that is stuck may have gigabytes of events.
    pub fn of_ends(path: &Path, most: usize) -> anyhow::Result<Self> {
        Self::open(path, Some(Ends::new(most)))
    }

    fn open(path: &Path, ends: Option<Ends>) -> anyhow::Result<Self> {
        let file = File::create(path)
            .with_context(|| format!("{}: cannot write the file", path.display()))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        Ok(Self(Rc::new(RefCell::new(Inner { path: path.into(), file, error: None, ends }))))
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
        Box::new(move |line| recording.write_line(format!("{line}\n")))
    }

    fn write_line(&self, line: String) {
        let line = match &mut self.0.borrow_mut().ends {
            Some(ends) => ends.add(line),
            None => Some(line),
        };
        if let Some(line) = line {
            self.write(|file| file.write_all(line.as_bytes()));
        }
    }

    fn write(&self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        let inner = &mut *self.0.borrow_mut();
        if inner.error.is_none() {
            inner.error = write(&mut inner.file).err();
        }
    }

    /// Writes the rest of the file.
    pub fn finish(&self) -> anyhow::Result<()> {
        let ends = self.0.borrow_mut().ends.take();
        if let Some(Ends { last, dropped, .. }) = ends {
            self.write(|file| {
                if dropped > 0 {
                    writeln!(file, "# {dropped} lines are left out here")?;
                }
                last.iter().try_for_each(|line| file.write_all(line.as_bytes()))
            });
        }
        self.write(BufWriter::flush);
        let inner = &mut *self.0.borrow_mut();
        match inner.error.take() {
            Some(error) => Err(error)
                .with_context(|| format!("{}: cannot write the file", inner.path.display())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Ends;

    #[test]
    fn of_a_long_trace_the_beginning_and_the_end_are_kept() {
        let mut ends = Ends::new(30);
        let begun: Vec<String> = (0..100).filter_map(|n| ends.add(format!("{n:09}\n"))).collect();
        assert_eq!(begun, ["000000000\n", "000000001\n", "000000002\n"]);
        assert_eq!(ends.last, ["000000097\n", "000000098\n", "000000099\n"]);
        assert_eq!((ends.dropped, ends.bytes), (94, 30));
        let mut short = Ends::new(30);
        assert!((0..3).all(|n| short.add(format!("{n:09}\n")).is_some()));
        assert_eq!(short.add("x".repeat(40)), None);
        assert_eq!((short.last.len(), short.dropped), (0, 1), "longer than all that is kept");
    }
}
