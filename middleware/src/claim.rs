//! A proxy's claim to its number at every source (docs/adr/0031).
//!
//! Transaction ids contain their proxy's number. Two proxies with one number would end each other's
//! prepared branches, each according to its own decision log. So a proxy holds a session lock on
//! its number at every source, and a row there names its decision log and the last incarnation of
//! that log. Without the claim, the proxy sends nothing to a source's agent and ignores the agent's
//! messages: [`Gate`].

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use orthodrome_core::NodeId;
use orthodrome_geotp::contract::Xid;
use orthodrome_geotp::sql::{Answer, Dialect};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{info, warn};

use super::auth::random_name;
use super::driver::{Endpoint, Fault, Outcome, Session, Trouble, quoted};
use super::source::in_time;

/// Interval between checks of a claim.
const LOOK: Duration = Duration::from_millis(500);
/// Pause before a retry.
const AGAIN: Duration = Duration::from_millis(100);
/// How long another session may hold the number: the session of a killed proxy ends a moment later.
const HELD: Duration = Duration::from_secs(10);
/// Number of tries of a statement that conflicts with another proxy's.
const TRIES: u32 = 10;
/// Seconds of silence after which a server ends a proxy's claim.
const IDLE_SECONDS: u32 = 30;
/// The first of the two numbers of PostgreSQL's advisory locks on proxy numbers is this plus the
/// proxy's number.
const LOCK_CLASS: u32 = 0x6f72_0000;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS orthodrome_proxies (proxy INT NOT NULL, at_source INT NOT NULL, \
                     log_name VARCHAR(64) NOT NULL, life BIGINT NOT NULL, holder VARCHAR(500) NOT NULL, \
                     PRIMARY KEY (proxy, at_source))";

/// Open while the claim at a source is held.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<AtomicBool>);

impl Gate {
    pub(crate) fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    fn set(&self, is_open: bool) {
        self.0.store(is_open, Ordering::Release);
    }
}

/// The proxy that claims a number.
#[derive(Debug)]
pub(crate) struct Claimant {
    /// The number.
    pub(crate) number: NodeId,
    /// A description of the holder, shown to other proxies that want the number.
    holder: String,
    /// The name of its decision log.
    log: String,
    /// The last incarnation in that log when it was opened; 0 if the log is new.
    life: u64,
    /// True if the operator states that the decision log of the number's last proxy is lost.
    takes_over: bool,
    /// The unique name of its sessions.
    label: String,
}

impl Claimant {
    pub(crate) fn new(
        number: NodeId,
        name: &str,
        log: String,
        life: u64,
        takes_over: bool,
    ) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.trim().is_empty() { "a host without a name" } else { host.trim() };
        let name: String = name.chars().take(100).collect();
        let holder = format!("proxy `{name}`, process {} on {host}", std::process::id());
        let label = format!("orthodrome_claim_{}", random_name());
        Self { number, holder: holder.chars().take(500).collect(), log, life, takes_over, label }
    }
}

/// A source's row about a number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    log: String,
    life: u64,
    holder: String,
}

/// Why a claim failed.
#[derive(Debug)]
enum Denied {
    /// The source refused, or its row forbids it. A retry would not help.
    Refused(String),
    /// The source is unreachable.
    Unreachable(Trouble),
}

impl From<Trouble> for Denied {
    fn from(trouble: Trouble) -> Self {
        Self::Unreachable(trouble)
    }
}

/// The claim at one source.
pub(crate) struct Claim {
    /// The source's name in the proxy's file.
    name: String,
    node: NodeId,
    endpoint: Endpoint,
    claimant: Arc<Claimant>,
    gate: Gate,
}

/// A claim, and the session that holds the number if the source was reachable.
pub(crate) struct Begun(Claim, Option<Session>);

/// A source's answer to a claim.
struct Told {
    is_taken: bool,
    /// The session that holds the number, if it is not this one.
    other: Option<u64>,
    row: Option<Row>,
}

fn cell(answer: Option<&Answer>, row: usize, column: usize) -> Option<String> {
    let cell = answer?.rows.get(row)?.get(column)?.clone()?;
    String::from_utf8(cell).ok()
}

impl Claim {
    pub(crate) fn new(
        name: String,
        node: NodeId,
        endpoint: &Endpoint,
        claimant: Arc<Claimant>,
        gate: Gate,
    ) -> Self {
        let endpoint = Endpoint { label: claimant.label.clone(), ..endpoint.clone() };
        Self { name, node, endpoint, claimant, gate }
    }

    /// Takes the number. `life` is the current incarnation, if there is one; `lost` is the session
    /// of this process that held the number before.
    async fn take(&self, life: u64, lost: Option<u64>) -> Result<(Session, Option<Row>), Denied> {
        // This process has written its current incarnation at the source only if it held the number
        // there before.
        let life = if lost.is_some() { life } else { self.claimant.life };
        let mut session = in_time(Session::connect(&self.endpoint)).await?;
        let deadline = Instant::now() + HELD;
        loop {
            let Told { is_taken, other, row } = self.ask(&mut session).await?;
            if let Some(row) = row.as_ref().filter(|_| !self.claimant.takes_over || lost.is_some())
            {
                self.check(row, life)?;
            }
            if is_taken {
                self.check_prepared(&mut session, lost.is_none()).await?;
                return Ok((session, row));
            }
            if let Some(lost) = lost.filter(|lost| other == Some(*lost)) {
                // The server has not noticed that the old connection is gone.
                self.endpoint.end_session(&mut session, lost).await?;
            } else if Instant::now() >= deadline {
                return Err(Denied::Refused(self.is_held(other, row.as_ref())));
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Runs a query batch, and retries if it conflicts with another proxy's claim.
    async fn carry_out(&self, session: &mut Session, text: &str) -> Result<Outcome, Denied> {
        for _ in 0..TRIES {
            let outcome = in_time(session.text(text, self.endpoint.one_way)).await?;
            let Some(fault) = &outcome.fault else { return Ok(outcome) };
            in_time(session.text("ROLLBACK", Duration::ZERO)).await?;
            if is_missing(fault) {
                self.make_table(session).await?;
            } else if is_forbidden(fault) {
                return Err(Denied::Refused(format!(
                    "source {}: user `{}` cannot claim number {}: {}; let the user read and change the table \
                     orthodrome_proxies",
                    self.name, self.endpoint.user, self.claimant.number.0, fault.message
                )));
            } else if !is_passing(fault) {
                return Err(Denied::Unreachable(Trouble::Fault(fault.clone())));
            }
        }
        let message = "claims of other proxies conflicted repeatedly; start again".to_owned();
        let fault = Fault { sqlstate: "40001".into(), number: 0, message };
        Err(Denied::Unreachable(Trouble::Fault(fault)))
    }

    async fn make_table(&self, session: &mut Session) -> Result<(), Denied> {
        let outcome = in_time(session.text(TABLE, self.endpoint.one_way)).await?;
        match outcome.fault {
            None => Ok(()),
            // Another proxy is making it at the same moment.
            Some(fault) if is_passing(&fault) => Ok(()),
            Some(fault) => Err(Denied::Refused(format!(
                "source {}: user `{}` cannot make the table in which proxies claim their numbers: {}; let the user make \
                 tables, or make it there, and let the user read and change it: {TABLE}",
                self.name, self.endpoint.user, fault.message
            ))),
        }
    }

    /// Tries to lock the number, and reads its row.
    async fn ask(&self, session: &mut Session) -> Result<Told, Denied> {
        let (number, source) = (self.claimant.number.0, self.node.0);
        let row = format!(
            "SELECT log_name, life, holder FROM orthodrome_proxies WHERE proxy = {number} AND at_source = {source}"
        );
        let (text, first) = match self.endpoint.kind {
            Dialect::PostgreSql => {
                let class = LOCK_CLASS + number;
                // Each statement sees all earlier commits.
                let text = format!(
                    "BEGIN ISOLATION LEVEL READ COMMITTED; \
                     SELECT pg_try_advisory_lock({class}, {source})::int, (SELECT min(pid) FROM pg_locks \
                     WHERE locktype = 'advisory' AND classid = {class} AND objid = {source} AND objsubid = 2 AND granted \
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())); {row}; COMMIT"
                );
                (text, 1)
            }
            Dialect::MariaDb => {
                // Names of branches are global to a server, and so are its locks.
                let name = format!("orthodrome_proxy_{number}_{source}");
                (format!("SELECT GET_LOCK('{name}', 0), IS_USED_LOCK('{name}'); {row}"), 0)
            }
        };
        let outcome = self.carry_out(session, &text).await?;
        let answer = |number: usize| outcome.done.get(number).map(|(answer, _)| answer);
        let row = answer(first + 1);
        let row = cell(row, 0, 0).map(|log| Row {
            log,
            life: cell(row, 0, 1).and_then(|life| life.parse().ok()).unwrap_or(u64::MAX),
            holder: cell(row, 0, 2).unwrap_or_default(),
        });
        let other = cell(answer(first), 0, 1).and_then(|id| id.parse().ok());
        Ok(Told { is_taken: cell(answer(first), 0, 0).as_deref() == Some("1"), other, row })
    }

    /// Checks that the number's last proxy had this proxy's log, and no later incarnation of it.
    fn check(&self, row: &Row, life: u64) -> Result<(), Denied> {
        let (source, number) = (&self.name, self.claimant.number.0);
        if row.log != self.claimant.log {
            return Err(Denied::Refused(format!(
                "source {source}: number {number} belongs to another decision log: {} has log {}, and this proxy has {}; \
                 give this proxy its own `node`, or restore that log. If that log is lost, read `A lost \
                 decision log` in docs/middleware.md and start once with --take-over",
                row.holder, row.log, self.claimant.log
            )));
        }
        if row.life > life {
            return Err(Denied::Refused(format!(
                "source {source}: this decision log is an old copy: its last incarnation is {life}, but incarnation {} of number \
                 {number} has run there ({}); restore the newest copy. If it is lost, read `A lost decision log` in \
                 docs/middleware.md and start once with --take-over",
                row.life, row.holder
            )));
        }
        Ok(())
    }

    fn is_held(&self, other: Option<u64>, row: Option<&Row>) -> String {
        let holder = row.map_or("another proxy", |row| row.holder.as_str());
        let session = other.map_or_else(String::new, |id| format!(" by its session {id}"));
        format!(
            "source {}: number {} is held{session}: {holder}; two proxies with one number would abort each other's \
             transactions; give this proxy another `node`, or stop the other",
            self.name, self.claimant.number.0
        )
    }

    /// Takes the number at the start, if the source is reachable, and returns the row that was
    /// there.
    async fn begin(&self) -> Result<(Option<Session>, Option<Row>), String> {
        match self.take(self.claimant.life, None).await {
            Ok((session, row)) => Ok((Some(session), row)),
            Err(Denied::Refused(why)) => Err(why),
            Err(Denied::Unreachable(trouble)) if self.claimant.takes_over => Err(format!(
                "source {}: cannot be reached: {trouble}; --take-over needs all sources, so start again when all can be \
                 reached",
                self.name
            )),
            Err(Denied::Unreachable(trouble)) => {
                warn!(source = %self.name, "cannot claim this proxy's number; no transaction runs there until it can: {trouble}");
                Ok((None, None))
            }
        }
    }

    /// Checks that there are no prepared branches of this number if its log has no decision.
    async fn check_prepared(&self, session: &mut Session, is_first: bool) -> Result<(), Denied> {
        let Claimant { number, takes_over, life, .. } = &*self.claimant;
        if !is_first || !(*takes_over || *life == 0) {
            return Ok(());
        }
        let prepared = in_time(session.prepared(self.node, self.endpoint.one_way)).await?;
        match prepared.into_iter().find(|xid| xid.middleware == *number) {
            None => Ok(()),
            Some(xid) => Err(Denied::Refused(self.is_undecided(xid))),
        }
    }

    fn is_undecided(&self, xid: Xid) -> String {
        format!(
            "source {}: transaction {xid} of number {} is prepared there, and this proxy's decision log does not know \
             whether it commits; bring back the log of that number, or end the transaction first: read `A lost decision \
             log` in docs/middleware.md",
            self.name, self.claimant.number.0
        )
    }

    /// Writes the new holder of the number. The server ends the claim of a proxy that vanishes
    /// after some time.
    async fn write(&self, session: &mut Session, life: u64) -> Result<(), Denied> {
        let Claimant { number, holder, log, .. } = &*self.claimant;
        let insert = format!(
            "INSERT INTO orthodrome_proxies (proxy, at_source, log_name, life, holder) VALUES ({}, {}, {}, {life}, {})",
            number.0,
            self.node.0,
            quoted(log),
            quoted(holder)
        );
        let text = match self.endpoint.kind {
            Dialect::PostgreSql => format!(
                "BEGIN ISOLATION LEVEL READ COMMITTED; {insert} ON CONFLICT (proxy, at_source) DO UPDATE SET \
                 log_name = EXCLUDED.log_name, life = EXCLUDED.life, holder = EXCLUDED.holder; COMMIT; \
                 SET idle_session_timeout = '{IDLE_SECONDS}s'; SET tcp_user_timeout = '{IDLE_SECONDS}s'"
            ),
            Dialect::MariaDb => format!(
                "{insert} ON DUPLICATE KEY UPDATE log_name = VALUES(log_name), life = VALUES(life), holder = VALUES(holder); \
                 SET SESSION wait_timeout = {IDLE_SECONDS}"
            ),
        };
        self.carry_out(session, &text).await.map(drop)
    }

    /// Keeps the number as long as the process runs. `begun` gets this incarnation when it is
    /// durable. `failed` gets the reason if another proxy has the number.
    async fn keep(
        self,
        mut held: Option<Session>,
        mut begun: watch::Receiver<u64>,
        failed: mpsc::UnboundedSender<String>,
    ) {
        let Ok(life) = begun.wait_for(|life| *life > 0).await.map(|life| *life) else { return };
        let (mut lost, mut is_told) = (None, false);
        loop {
            let Err(denied) = self.hold(held.take(), life, &mut lost).await;
            match denied {
                Denied::Refused(why) => {
                    // The process ends because of this, so the receiver may be gone.
                    let _ = failed.send(why);
                    return;
                }
                Denied::Unreachable(trouble) => {
                    if self.gate.is_open() || !std::mem::replace(&mut is_told, true) {
                        warn!(source = %self.name, "this proxy's number is not claimed there, so no transaction runs there: {trouble}");
                    }
                    self.gate.set(false);
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Holds the number until it is lost or cannot be taken.
    async fn hold(
        &self,
        held: Option<Session>,
        life: u64,
        lost: &mut Option<u64>,
    ) -> Result<Infallible, Denied> {
        let mut session = match held {
            Some(session) => session,
            None => self.take(life, *lost).await?.0,
        };
        *lost = Some(session.interrupt().id());
        self.write(&mut session, life).await?;
        info!(source = %self.name, number = self.claimant.number.0, life, "claimed");
        self.gate.set(true);
        loop {
            // A server that dies closes its sessions, which ends the wait.
            let _ = tokio::time::timeout(LOOK, session.stirs()).await;
            in_time(session.text("SELECT 1", Duration::ZERO)).await?;
        }
    }
}

/// Whether an error says that the table of claims does not exist.
fn is_missing(fault: &Fault) -> bool {
    fault.sqlstate == "42P01" || fault.number == 1146
}

/// Whether an error says that the user has no permission.
fn is_forbidden(fault: &Fault) -> bool {
    fault.sqlstate == "42501" || matches!(fault.number, 1044 | 1142 | 1143)
}

/// Whether an error is a temporary conflict with another proxy's claim.
fn is_passing(fault: &Fault) -> bool {
    fault.sqlstate.starts_with("40")
        || matches!(fault.sqlstate.as_str(), "23505" | "42P07" | "55P03")
        || matches!(fault.number, 1205 | 1213 | 1050)
}

/// Takes the number at every reachable source. Returns the highest incarnation in any row of a
/// number that is taken over; this proxy's incarnations must be above it.
///
/// # Errors
/// Why this proxy cannot have the number.
pub(crate) async fn begin(claims: Vec<Claim>) -> Result<(Vec<Begun>, u64), String> {
    let mut beginning = JoinSet::new();
    for claim in claims {
        beginning.spawn(async move {
            let found = claim.begin().await;
            (claim, found)
        });
    }
    let (mut begun, mut highest) = (Vec::new(), 0);
    while let Some(ended) = beginning.join_next().await {
        let (claim, found) = ended.map_err(|error| format!("a claim failed: {error}"))?;
        let (held, row) = found?;
        highest = row.map_or(0, |row| row.life).max(highest);
        begun.push(Begun(claim, held));
    }
    Ok((begun, highest))
}

/// Keeps claims until the returned value is dropped.
pub(crate) fn keep(
    claims: Vec<Begun>,
    begun: &watch::Receiver<u64>,
    failed: &mpsc::UnboundedSender<String>,
) -> JoinSet<()> {
    let mut kept = JoinSet::new();
    for Begun(claim, held) in claims {
        kept.spawn(claim.keep(held, begun.clone(), failed.clone()));
    }
    kept
}
