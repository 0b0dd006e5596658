//! Savepoints by the names of clients. A savepoint causes no message: the middleware's machine
//! ensures that each branch has the savepoints that it needs (`orthodrome_geotp::middleware`).

use orthodrome_geotp::contract::Xid;
use orthodrome_geotp::sql::Dialect;
use orthodrome_geotp::sql::parse::Savepoint;

use super::rounds::Open;
use super::session::{Engine, Reply, Session, SqlError};
use super::settings::Settings;

/// The savepoints of a session's transaction, oldest first.
#[derive(Default)]
pub(crate) struct Savepoints {
    all: Vec<Named>,
    /// The number of the last savepoint.
    last: u32,
    /// True if earlier changes are lost: the sources have rolled back the whole transaction.
    is_lost: bool,
}

struct Named {
    name: String,
    number: u32,
    /// The settings at the savepoint, which PostgreSQL restores too.
    settings: Settings,
}

impl Savepoints {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Removes all savepoints at the end of the transaction.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Notes that the sources have rolled back the whole transaction.
    pub(crate) fn lose(&mut self) {
        self.is_lost = !self.all.is_empty();
    }

    /// A number for the next savepoint.
    pub(crate) fn next(&mut self) -> u32 {
        self.last += 1;
        self.last
    }

    /// The savepoints of a transaction that begins now.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.all.iter().map(|one| one.number)
    }
}

impl Session {
    /// Executes SAVEPOINT, ROLLBACK TO and RELEASE.
    pub(crate) fn savepoint(&mut self, what: Savepoint, name: &str) -> Result<Reply, SqlError> {
        self.proxy.engine.xa()?;
        let is_postgres = self.client == Dialect::PostgreSql;
        let tag = match what {
            Savepoint::Set => "SAVEPOINT",
            Savepoint::RollbackTo => "ROLLBACK",
            Savepoint::Release => "RELEASE",
        };
        let is_block = self.in_block || (!is_postgres && !self.is_autocommit());
        if !is_block && is_postgres {
            let words = match what {
                Savepoint::Set => "SAVEPOINT",
                Savepoint::RollbackTo => "ROLLBACK TO SAVEPOINT",
                Savepoint::Release => "RELEASE SAVEPOINT",
            };
            let why = format!("{words} can only be used in transaction blocks");
            return Err(SqlError::new("25P01", why));
        }
        // After a failure, PostgreSQL accepts only a rollback to a savepoint.
        if !(is_postgres && what == Savepoint::RollbackTo) {
            self.check_failed()?;
        }
        if what == Savepoint::Set {
            if is_block {
                self.set_savepoint(name);
            }
            return Ok(Reply::done(tag));
        }
        let place = self.savepoints.all.iter().rposition(|one| one.name == name);
        let Some(place) = place else { return Err(self.no_savepoint(name)) };
        if self.savepoints.is_lost {
            return Err(SqlError::new(
                "40001",
                format!(
                    "savepoint \"{name}\" is gone, because a source has rolled back the whole transaction; \
                     send ROLLBACK, then begin the transaction again"
                ),
            ));
        }
        let xid = self.open.as_ref().map(Open::xid);
        let Some(number) = self.savepoints.all.get(place).map(|one| one.number) else {
            return Err(self.no_savepoint(name));
        };
        if what == Savepoint::Release {
            self.savepoints.all.truncate(place);
            self.tell(xid, |engine, xid| engine.release_savepoint(xid, number));
            return Ok(Reply::done(tag));
        }
        self.savepoints.all.truncate(place + 1);
        self.tell(xid, |engine, xid| engine.roll_back_to(xid, number));
        if let (true, Some(last)) = (is_postgres, self.savepoints.all.last()) {
            self.settings.go_back(&last.settings);
        }
        self.went_back();
        Ok(Reply::done(tag))
    }

    fn set_savepoint(&mut self, name: &str) {
        if self.client == Dialect::MariaDb {
            // It replaces one of the same name; those in between remain.
            self.savepoints.all.retain(|one| one.name != name);
        }
        let (number, settings) = (self.savepoints.next(), self.settings.clone());
        self.savepoints.all.push(Named { name: name.to_owned(), number, settings });
        let xid = self.open.as_ref().map(Open::xid);
        self.tell(xid, |engine, xid| engine.set_savepoint(xid, number));
    }

    fn tell(&self, xid: Option<Xid>, order: impl FnOnce(&Engine, Xid)) {
        if let Some(xid) = xid {
            order(&self.proxy.engine, xid);
        }
    }

    fn no_savepoint(&self, name: &str) -> SqlError {
        match self.client {
            Dialect::PostgreSql => {
                SqlError::new("3B001", format!("savepoint \"{name}\" does not exist"))
            }
            Dialect::MariaDb => SqlError {
                sqlstate: "42000".into(),
                number: 1305,
                message: format!("SAVEPOINT {name} does not exist"),
                position: 0,
            },
        }
    }
}
