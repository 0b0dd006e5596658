//! The state of a shell between commands: the client, the open transaction, a transaction of
//! unknown outcome.

use std::fmt::Write as _;

use orthodrome_client::{
    AbortReason, Aborted, Begun, Client, Error, InDoubt, Key, Op, OpenGeneral, OpenTransaction,
    Outcome, Priority, Reads, Writes,
};
use orthodrome_core::machine::Admin;
use orthodrome_core::{Txn, TxnId};

use super::command::{COMMANDS, Command, Range, Usage, find};
use super::describe;
use super::words::quote;
use crate::style::Style;

/// A session on one cluster.
pub(super) struct Session {
    client: Client,
    open: Option<Open>,
    doubt: Option<InDoubt>,
    priority: Priority,
    style: Style,
}

/// A transaction between its rounds.
struct Open {
    txn: Between,
    /// The operations so far, in order.
    ops: Vec<Op>,
}

enum Between {
    /// An interactive transaction, which declared its keys.
    Declared { txn: OpenTransaction, reads: Vec<Key>, writes: Vec<Key> },
    /// A general transaction, which finds its keys by reading.
    General(Box<OpenGeneral>),
}

impl Between {
    fn id(&self) -> TxnId {
        match self {
            Self::Declared { txn, .. } => txn.id(),
            Self::General(txn) => txn.id(),
        }
    }

    fn reads(&self) -> &Reads {
        match self {
            Self::Declared { txn, .. } => txn.reads(),
            Self::General(txn) => txn.reads(),
        }
    }

    async fn commit(self, writes: Writes) -> Result<Outcome, Error> {
        match self {
            Self::Declared { txn, .. } => txn.commit(writes).await,
            Self::General(txn) => txn.commit(writes).await,
        }
    }

    async fn abort(self) {
        match self {
            Self::Declared { txn, .. } => txn.abort().await,
            Self::General(txn) => txn.abort().await,
        }
    }
}

impl Session {
    pub(super) fn new(client: Client, is_tty: bool) -> Self {
        Self { client, open: None, doubt: None, priority: Priority::LOW, style: Style::new(is_tty) }
    }

    pub(super) fn style(&self) -> Style {
        self.style
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    pub(super) fn prompt(&self) -> String {
        match &self.open {
            Some(open) => format!("{}> ", open.txn.id()),
            None => "orthodrome> ".into(),
        }
    }

    /// The greeting, which names the cluster and the gateway.
    pub(super) async fn welcome(&self) -> String {
        match self.client.describe().await {
            Ok(about) => describe::welcome(&about),
            Err(error) => format!("connected, but the cluster did not describe itself: {error}"),
        }
    }

    /// Runs one command and returns the output.
    ///
    /// # Errors
    /// Why the command failed.
    pub(super) async fn run(&mut self, command: Command) -> Result<String, String> {
        match command {
            Command::Get(keys) => self.get(keys).await,
            Command::GetStale(keys) => self.get_stale(&keys).await,
            Command::Scan(wanted) => self.scan(wanted).await,
            Command::Count(wanted) => {
                self.check_closed("count")?;
                let count = self.client.count(wanted.range).await;
                Ok(counted(count.map_err(|error| error.to_string())?))
            }
            Command::DeleteRange(wanted) => {
                self.check_closed("delete-range")?;
                let deleted = self.client.delete_range(wanted.range).await;
                let deleted = deleted.map_err(|error| {
                    if let Error::Invalid(_) = error {
                        return error.to_string();
                    }
                    format!("{error}; some keys may be deleted, so repeat the command")
                })?;
                Ok(format!("{} deleted", counted(deleted)))
            }
            Command::Ops(ops) => self.ops(ops, None).await,
            Command::PutLeased(lease, ops) => {
                let ended = format!("the lease {lease} has ended; `lease` grants a new one");
                self.ops(ops, Some(&ended)).await
            }
            Command::Lease(ttl) => {
                let lease = self.client.grant_lease(ttl).await;
                Ok(lease.map_err(|error| error.to_string())?.to_string())
            }
            Command::Renew(lease) => {
                self.client.renew_lease(lease).await.map_err(|error| error.to_string())?;
                Ok("renewed".into())
            }
            Command::Revoke(lease) => {
                // Other gateways may have deleted some of its keys, so their number would mislead.
                self.client.revoke_lease(lease).await.map_err(|error| error.to_string())?;
                Ok("revoked".into())
            }
            Command::ShowLease(lease) => {
                let lease = self.client.lease(lease).await.map_err(|error| error.to_string())?;
                Ok(describe::lease(&lease))
            }
            Command::Begin { reads, writes } => self.begin(reads, writes).await,
            Command::Commit => self.commit().await,
            Command::Abort => self.abort().await,
            Command::Resolve => self.resolve().await,
            Command::Priority(priority) => Ok(self.set_priority(priority)),
            Command::Describe => {
                let about = self.client.describe().await.map_err(|error| error.to_string())?;
                Ok(describe::cluster(&about, self.style))
            }
            Command::Status => {
                let status = self.client.status().await.map_err(|error| error.to_string())?;
                Ok(describe::status(&status))
            }
            Command::Order(Admin::TransferLeader { partition, to }) => {
                let taken = self.client.transfer_leader(partition, to).await;
                let by = taken.map_err(|error| error.to_string())?;
                Ok(format!("{by} leads {partition} and hands leadership to {to}"))
            }
            Command::Order(Admin::ChangeMembers { partition, voters, learners }) => {
                let taken = self.client.change_members(partition, &voters, &learners).await;
                let by = taken.map_err(|error| error.to_string())?;
                Ok(format!("{by} has taken the order for {partition}; `orders` shows its state"))
            }
            Command::Orders => Ok(describe::orders(&self.client.statuses().await)),
            Command::Help(topic) => help(topic.as_deref()),
            // The shell itself runs these commands.
            Command::Nothing | Command::History | Command::Quit => Ok(String::new()),
        }
    }

    async fn get(&mut self, keys: Vec<Key>) -> Result<String, String> {
        if self.open.is_some() {
            self.learn(&keys).await?;
        }
        if let Some(open) = &self.open {
            return open.get(&keys);
        }
        let query = self.client.read(keys.clone()).priority(self.priority);
        let snapshot = query.await.map_err(|error| error.to_string())?;
        Ok(show(&keys, |key| snapshot.reads.get(key.clone()).map(<[u8]>::to_vec)))
    }

    /// Refuses a command that is not possible in a transaction.
    fn check_closed(&self, command: &str) -> Result<(), String> {
        self.open.as_ref().map_or(Ok(()), |open| {
            let id = open.txn.id();
            Err(format!(
                "{id} is open, and `{command}` is not possible in a transaction; `commit` or `abort` it first"
            ))
        })
    }

    async fn scan(&self, wanted: Range) -> Result<String, String> {
        self.check_closed("scan")?;
        let Range { range, is_backwards, limit, keys_only } = wanted;
        let (mut lines, mut left, mut rest) = (Vec::new(), limit, Some(range));
        while let Some(range) = rest.take() {
            let mut scan = self.client.scan(range).priority(self.priority);
            scan = if is_backwards { scan.backwards() } else { scan };
            scan = if keys_only { scan.keys_only() } else { scan };
            scan = match left {
                Some(left) => scan.limit(left),
                None => scan,
            };
            let page = scan.await.map_err(|error| error.to_string())?;
            let shown = page.rows.len();
            left = left.map(|left| left.saturating_sub(u32::try_from(shown).unwrap_or(u32::MAX)));
            for row in page.rows {
                let key = quote(row.key.bytes());
                lines.push(match row.value {
                    Some(value) => format!("{key} = {}", quote(&value.0)),
                    None => key,
                });
            }
            rest = page.rest.filter(|_| left != Some(0));
            if rest.is_some() && shown > 0 {
                lines.push("-- the next page, at a later moment:".into());
            }
        }
        if lines.last().is_some_and(|line| line.starts_with("-- ")) {
            lines.pop();
        }
        Ok(if lines.is_empty() { "no keys".into() } else { lines.join("\n") })
    }

    async fn get_stale(&self, keys: &[Key]) -> Result<String, String> {
        self.check_closed("get-stale")?;
        let query = self.client.read(keys.to_vec()).priority(self.priority).stale();
        let snapshot = query.await.map_err(|error| error.to_string())?;
        Ok(show(keys, |key| value_of(&snapshot.reads, key)))
    }

    /// Reads the keys that the open transaction has not read yet, if it may.
    async fn learn(&mut self, keys: &[Key]) -> Result<(), String> {
        let Some(Open { txn: Between::General(txn), ops }) = &mut self.open else { return Ok(()) };
        let is_written = |key: &Key| ops.iter().any(|op| op.writes().contains(key));
        let unknown = keys.iter().filter(|key| !is_written(key)).cloned();
        if let Err(error) = txn.read(unknown).await {
            self.open = None;
            return Err(format!("{error}; the transaction has ended"));
        }
        Ok(())
    }

    /// Runs operations, or adds them to the open transaction. `guard` says why one of their guards fails, if
    /// that is known.
    async fn ops(&mut self, ops: Vec<Op>, guard: Option<&str>) -> Result<String, String> {
        let needed: Vec<Key> = ops.iter().flat_map(Op::reads).cloned().collect();
        self.learn(&needed).await?;
        if let Some(open) = &mut self.open {
            return open.push(ops, guard);
        }
        let outcome = self.client.execute(ops).priority(self.priority).await;
        self.ended(outcome, guard)
    }

    async fn begin(&mut self, reads: Vec<Key>, writes: Vec<Key>) -> Result<String, String> {
        if let Some(open) = &self.open {
            return Err(format!("{} is open; `commit` or `abort` it first", open.txn.id()));
        }
        if reads.is_empty() && writes.is_empty() {
            let txn = self.client.general().priority(self.priority).begin();
            self.open = Some(Open { txn: Between::General(Box::new(txn)), ops: Vec::new() });
            return Ok("open".into());
        }
        let mut txn = self.client.transaction().priority(self.priority);
        for key in &reads {
            txn = txn.read(key.clone());
        }
        for key in &writes {
            txn = txn.write(key.clone());
        }
        match txn.begin().await.map_err(|error| error.to_string())? {
            Begun::Aborted(aborted) => Err(format!("aborted: {}", reason(aborted.reason))),
            Begun::Open(txn) => {
                let text = show(&reads, |key| txn.reads().get(key.clone()).map(<[u8]>::to_vec));
                let txn = Between::Declared { txn, reads, writes };
                self.open = Some(Open { txn, ops: Vec::new() });
                Ok(if text.is_empty() { "open".into() } else { text })
            }
        }
    }

    async fn commit(&mut self) -> Result<String, String> {
        let open = self.open.take().ok_or("no transaction is open; `begin` opens one")?;
        let writes = open.pending().map_err(|reason| reason.to_string())?;
        let outcome = open.txn.commit(writes).await;
        self.ended(outcome, None)
    }

    async fn abort(&mut self) -> Result<String, String> {
        let open = self.open.take().ok_or("no transaction is open; `begin` opens one")?;
        open.txn.abort().await;
        Ok("aborted".into())
    }

    async fn resolve(&mut self) -> Result<String, String> {
        let doubt = self.doubt.take().ok_or("no transaction has an unknown outcome")?;
        let outcome = doubt.resolve().await;
        self.ended(Ok(outcome), None)
    }

    fn set_priority(&mut self, priority: Option<Priority>) -> String {
        self.priority = priority.unwrap_or(self.priority);
        format!("priority {}", self.priority)
    }

    fn ended(
        &mut self,
        outcome: Result<Outcome, Error>,
        guard: Option<&str>,
    ) -> Result<String, String> {
        match outcome.map_err(|error| error.to_string())? {
            Outcome::Committed(_) => Ok(self.style.good("committed")),
            Outcome::Aborted(Aborted { reason: AbortReason::Guard, .. }) if guard.is_some() => {
                Err(format!("aborted: {}", guard.unwrap_or_default()))
            }
            Outcome::Aborted(aborted) => Err(format!("aborted: {}", reason(aborted.reason))),
            Outcome::Unknown(doubt) => {
                let text = format!(
                    "unknown: {} may have committed or not ({}); use `resolve` to ask again",
                    doubt.txn(),
                    doubt.trouble()
                );
                self.doubt = Some(doubt);
                Err(text)
            }
        }
    }

    /// Ends the open transaction; returns a message if writes are lost with it.
    pub(super) async fn close(&mut self) -> Option<String> {
        let open = self.open.take()?;
        let (id, is_idle) = (open.txn.id(), open.ops.is_empty());
        open.txn.abort().await;
        (!is_idle).then(|| format!("{id} was still open at the end of the shell; it is aborted"))
    }
}

impl Open {
    /// The writes that result from the operations so far.
    fn pending(&self) -> Result<Writes, orthodrome_core::txn::AbortReason> {
        Txn::execute(&self.ops, self.txn.reads().as_map()).map(Writes::from_iter)
    }

    /// The values of keys as this transaction sees them, its own writes included.
    fn get(&self, keys: &[Key]) -> Result<String, String> {
        let written = Txn::execute(&self.ops, self.txn.reads().as_map())
            .map_err(|reason| reason.to_string())?;
        if let Between::Declared { reads, .. } = &self.txn
            && let Some(key) =
                keys.iter().find(|key| !reads.contains(key) && !written.contains_key(*key))
        {
            return Err(undeclared(key, "read", "left"));
        }
        let value = |key: &Key| match written.get(key) {
            Some(value) => value.as_ref().map(|value| value.0.to_vec()),
            None => value_of(self.txn.reads(), key),
        };
        Ok(show(keys, value))
    }

    /// Adds operations to the open transaction, if their keys are declared and their guards hold.
    fn push(&mut self, ops: Vec<Op>, guard: Option<&str>) -> Result<String, String> {
        let kept = self.ops.len();
        if let Between::Declared { reads, writes, .. } = &self.txn {
            for op in &ops {
                if let Some(key) = op.writes().iter().find(|key| !writes.contains(*key)) {
                    return Err(undeclared(key, "written", "right"));
                }
                let is_known = |key: &&Key| {
                    reads.contains(*key) || self.ops.iter().any(|op| op.writes().contains(*key))
                };
                if let Some(key) = op.reads().iter().find(|key| !is_known(key)) {
                    return Err(undeclared(key, "read", "left"));
                }
            }
        }
        self.ops.extend(ops);
        if let Err(reason) = self.pending() {
            self.ops.truncate(kept);
            let why = if reason == orthodrome_core::txn::AbortReason::TooLarge {
                "the value would exceed the limit of 1 MiB"
            } else {
                guard.unwrap_or("the current value of the key does not allow the operation")
            };
            return Err(format!("refused: {why}; the transaction is still open"));
        }
        Ok(String::new())
    }
}

fn counted(count: u64) -> String {
    if count == 1 { "1 key".into() } else { format!("{count} keys") }
}

fn undeclared(key: &Key, what: &str, side: &str) -> String {
    let key = quote(key.bytes());
    format!("{key} is not declared as {what}; name it to the {side} of -> in `begin`")
}

fn value_of(reads: &Reads, key: &Key) -> Option<Vec<u8>> {
    reads.get(key.clone()).map(<[u8]>::to_vec)
}

/// One line for each key.
fn show(keys: &[Key], value: impl Fn(&Key) -> Option<Vec<u8>>) -> String {
    let mut text = String::new();
    for key in keys {
        let name = quote(key.bytes());
        // Writing to a string cannot fail.
        let _ = match value(key) {
            Some(value) => writeln!(text, "{name} = {}", quote(&value)),
            None => writeln!(text, "{name}: nothing"),
        };
    }
    text
}

/// An explanation of an abort that tells the user what to do.
fn reason(reason: AbortReason) -> String {
    let advice = match reason {
        AbortReason::Guard => "the value of a key does not allow the operation",
        AbortReason::TooLarge => "the value would exceed the limit of 1 MiB",
        AbortReason::StaleRead => "a value that it read has changed; begin again",
        AbortReason::Conflict => "it conflicts with another transaction; try again",
        AbortReason::Abandoned => "it was open for too long; begin again",
        AbortReason::Overload => "the cluster is busy; try again later",
        AbortReason::Recovery => "a failure in the cluster interrupted it; try again",
        AbortReason::Client | AbortReason::Invalid | AbortReason::Other(_) => "",
        // Later versions may have more reasons.
        _ => "",
    };
    if advice.is_empty() { reason.to_string() } else { format!("{reason} ({advice})") }
}

fn help(topic: Option<&str>) -> Result<String, String> {
    let mut text = String::new();
    if let Some(topic) = topic {
        let usage = find(topic)
            .ok_or_else(|| format!("unknown command {topic:?}; `help` lists all commands"))?;
        let _ = writeln!(text, "{} {}", usage.name, usage.arguments);
        let _ = writeln!(text, "  {}", usage.summary);
        for line in usage.details.lines() {
            let _ = writeln!(text, "  {line}");
        }
        return Ok(text);
    }
    let form = |usage: &Usage| format!("{} {}", usage.name, usage.arguments);
    // The width is in characters and not in bytes, because some characters are not ASCII.
    let width = COMMANDS.iter().map(|usage| form(usage).chars().count()).max().unwrap_or(0) + 2;
    for usage in COMMANDS {
        let _ = writeln!(text, "  {:<width$}{}", form(usage), usage.summary);
    }
    let _ = writeln!(
        text,
        "`help COMMAND` shows details. Quote keys and values that contain blanks; # starts a comment."
    );
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_client::Value;

    #[test]
    fn shown_values_can_be_typed_again() {
        let value = |key: &Key| (key.len() > 1).then(|| Value::from("a b").0.to_vec());
        assert_eq!(show(&["k".into(), "key".into()], value), "k: nothing\nkey = \"a b\"\n");
    }

    #[test]
    fn every_shell_command_has_help() {
        let all = help(None).unwrap();
        for usage in COMMANDS {
            assert!(all.contains(&format!("  {}", usage.name)), "{}", usage.name);
            assert!(help(Some(usage.name)).unwrap().contains(usage.summary));
        }
        assert!(help(Some("jump")).is_err());
    }
}
