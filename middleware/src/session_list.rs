//! The sessions of an agent at its source, in a file: the next incarnation of the agent ends those
//! that are still running.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use orthodrome_core::ordered::OrdSet;

/// Number of sessions in the file from which on those that have ended are removed.
const LONG: usize = 4_096;

/// A session: the start of its server, and its number there.
pub(crate) type Listed = (u64, u64);

/// A list of sessions.
pub(crate) struct SessionList(Arc<Inner>);

struct Inner {
    path: PathBuf,
    /// The sessions of this incarnation that may be running.
    own: Mutex<OrdSet<Listed>>,
}

impl Inner {
    fn own(&self) -> MutexGuard<'_, OrdSet<Listed>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sync_folder(&self) -> io::Result<()> {
        match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
            _ => Ok(()),
        }
    }

    fn add(&self, session: Listed) -> io::Result<()> {
        // The lock keeps the file as it is meanwhile.
        let mut own = self.own();
        let is_new = !self.path.exists();
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        file.write_all(format!("{} {}\n", session.0, session.1).as_bytes())?;
        file.sync_data()?;
        if is_new {
            self.sync_folder()?;
        }
        own.insert(session);
        Ok(())
    }

    fn forget(&self, ended: &OrdSet<Listed>) -> io::Result<()> {
        let mut own = self.own();
        own.retain(|session| !ended.contains(session));
        let text: String = own.iter().map(|(start, id)| format!("{start} {id}\n")).collect();
        let new = self.path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        self.sync_folder()
    }
}

impl SessionList {
    /// The list in this file.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(Arc::new(Inner { path, own: Mutex::default() }))
    }

    /// The sessions of earlier incarnations that may be running.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn earlier(&self) -> io::Result<Vec<Listed>> {
        let own = self.0.own();
        let text = match fs::read_to_string(&self.0.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        // The last line may be cut off. Nothing ran in its session.
        let lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        let session = |line: &str| {
            let (start, id) = line.split_once(' ')?;
            Some((start.parse().ok()?, id.parse().ok()?))
        };
        Ok(lines.filter_map(session).filter(|session| !own.contains(session)).collect())
    }

    /// The sessions of this incarnation that may be running.
    pub(crate) fn own(&self) -> OrdSet<Listed> {
        self.0.own().clone()
    }

    /// Whether sessions that have ended should be removed.
    pub(crate) fn is_long(&self) -> bool {
        self.0.own().len() >= LONG
    }

    /// Adds a session. When this returns, the session is on disk.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) async fn add(&self, session: Listed) -> io::Result<()> {
        let inner = self.0.clone();
        let added = tokio::task::spawn_blocking(move || inner.add(session));
        added.await.map_err(io::Error::other)?
    }

    /// Removes sessions of this incarnation that have ended, and all of earlier ones.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) async fn forget(&self, ended: OrdSet<Listed>) -> io::Result<()> {
        let inner = self.0.clone();
        let forgotten = tokio::task::spawn_blocking(move || inner.forget(&ended));
        forgotten.await.map_err(io::Error::other)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sessions_are_listed_until_they_have_ended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sessions");
        let list = SessionList::new(path.clone());
        assert_eq!(list.earlier().unwrap(), []);
        for id in 1..=3 {
            list.add((7, id)).await.unwrap();
        }
        // Those of this incarnation are not earlier ones, however often the list is read.
        assert_eq!(list.earlier().unwrap(), []);
        list.forget([(7, 2)].into()).await.unwrap();
        assert_eq!(list.own(), [(7, 1), (7, 3)].into());
        let next = SessionList::new(path.clone());
        assert_eq!(next.earlier().unwrap(), [(7, 1), (7, 3)]);
        next.add((7, 4)).await.unwrap();
        assert_eq!(next.earlier().unwrap(), [(7, 1), (7, 3)]);
        next.forget(OrdSet::new()).await.unwrap();
        // A line that is cut off names no session.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"7 55").unwrap();
        assert_eq!(SessionList::new(path).earlier().unwrap(), [(7, 4)]);
    }
}
