//! One client: submits one transaction at a time through the client library, and records what it
//! saw.

use std::borrow::Cow;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use orthodrome_client::{
    Abort, Attempt as Seen, Client, Config, GeneralTxn, InDoubt, Op, Outcome as Told,
    Reads as ReadBack, Version, Writes,
};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::procedure::Call;
use orthodrome_core::time::{Time, nanos};
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Outcome, Read, Reads};
use orthodrome_core::{RegionId, Txn, TxnId, Value};
use orthodrome_eval::history::Entry;
use orthodrome_eval::record::{Attempt, RecordError, entry};
use orthodrome_eval::workload::{Issuer, Request, Step};
use orthodrome_sim::load::ranging::Watched;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::driver::{Shared, Source};
use super::results::{Commit, Ended, Failed};

/// How long a client keeps asking for an outcome that was unknown at the deadline. After that, the
/// outcome stays unknown in the history.
const DOUBT_MAX: Duration = Duration::from_secs(15);

/// One client of the load, connected to the cluster.
pub struct LoadClient {
    pub(super) client: Client,
    seen: UnboundedReceiver<Seen>,
    pub(super) issuer: Issuer,
    /// What its watches have shown.
    pub(super) watched: Option<Arc<Mutex<Watched>>>,
}

impl LoadClient {
    /// Connects.
    ///
    /// # Errors
    /// No gateway accepted the client.
    pub async fn connect(
        config: Config,
        index: u32,
        region: RegionId,
    ) -> Result<Self, orthodrome_client::Error> {
        let (sender, seen) = unbounded_channel();
        let client = Client::connect(config.attempts(sender)).await?;
        let issuer = Issuer { client: client.id(), index, region };
        Ok(Self { client, seen, issuer, watched: None })
    }

    /// The client's identity for a workload.
    pub fn issuer(&self) -> Issuer {
        self.issuer
    }

    /// Runs one request that arrived at `arrived`, and returns its result.
    pub async fn ask(
        &mut self,
        shared: &Shared,
        workload: &Source,
        request: &Request,
        arrived: Instant,
    ) -> Ended {
        if let Some(ranging) = &request.scan {
            return self.range(shared, workload, (request, ranging), arrived).await;
        }
        if workload.has_scans {
            shared.ranges.will_write(&request.writes);
        }
        let prefix = shared.prefix.as_str();
        let told = self.call(workload, request, prefix).await;
        let mut seen: Vec<Seen> = std::iter::from_fn(|| self.seen.try_recv().ok()).collect();
        let result = match told {
            Ok(Told::Unknown(doubt)) => settle(doubt, &mut seen).await,
            Ok(Told::Committed(_)) => Ok(()),
            Ok(Told::Aborted(aborted)) => Err(match AbortReason::from(aborted.reason) {
                AbortReason::Client | AbortReason::Guard | AbortReason::TooLarge => Failed::Refused,
                reason @ (AbortReason::Conflict
                | AbortReason::StaleRead
                | AbortReason::Recovery
                | AbortReason::Abandoned
                | AbortReason::Overload
                | AbortReason::Invalid) => Failed::Aborted(reason.to_string()),
            }),
            Err(error) => Err(Failed::Aborted(error.to_string())),
        };
        let home = seen.last().map_or(self.issuer.region, |last| last.home);
        let mut ended = Ended {
            home,
            priority: request.priority,
            result: result.map(|()| Commit {
                latency: arrived.elapsed(),
                floor: shared.floor(home, request),
                name: request.name,
                reach: shared.reach(home, request),
                is_watch: request.is_watch(),
            }),
            reads: None,
            aborts: seen.iter().filter_map(aborted).collect(),
            entries: Vec::new(),
            findings: Vec::new(),
        };
        shared.take_down(workload, request, &seen, &mut ended);
        ended
    }

    async fn call(
        &self,
        source: &Source,
        request: &Request,
        prefix: &str,
    ) -> Result<Told, orthodrome_client::Error> {
        let place = |key: &Key| prefixed(prefix, key);
        match &request.kind {
            Kind::Interactive => {
                let mut txn = self.client.transaction().priority(request.priority);
                for key in &request.reads {
                    txn = txn.read(place(key));
                }
                for key in &request.writes {
                    txn = txn.write(place(key));
                }
                let compute = |reads: &ReadBack| match source
                    .decide(request, &stripped(prefix, reads.as_map()))
                {
                    Decision::Abort => Err(Abort::because("the workload aborts this transaction")),
                    Decision::Commit(writes) => Ok(writes
                        .into_iter()
                        .map(|(key, value)| (place(&key), value))
                        .collect::<Writes>()),
                };
                txn.run(compute).await
            }
            Kind::General => {
                let follow = |txn: GeneralTxn| async move {
                    let mut known = Reads::new();
                    loop {
                        match source.step(request, &known) {
                            Step::Read(keys) => {
                                let values = txn.get_all(keys.iter().map(place)).await?;
                                let reads = values
                                    .into_iter()
                                    .map(|value| Read { value, version: Version::INITIAL });
                                known.extend(keys.into_iter().zip(reads));
                            }
                            Step::Decide(Decision::Abort) => {
                                return Err(Abort::because("the workload aborts this transaction"));
                            }
                            Step::Decide(Decision::Commit(writes)) => {
                                for (key, value) in writes {
                                    match value {
                                        Some(value) => txn.put(place(&key), value),
                                        None => txn.delete(place(&key)),
                                    }
                                }
                                return Ok(());
                            }
                        }
                    }
                };
                self.client.general().priority(request.priority).run(follow).await
            }
            Kind::Procedure(ops) => {
                let ops = ops.iter().map(|op| moved(op, place));
                self.client.execute(ops).priority(request.priority).await
            }
            Kind::ReadOnly | Kind::StaleReadOnly => {
                let keys = request.reads.iter().map(place);
                let query = self.client.read(keys).priority(request.priority);
                let is_stale = request.kind == Kind::StaleReadOnly;
                let snapshot = if is_stale { query.stale() } else { query }.await?;
                let orthodrome_client::Snapshot { timestamp, reads } = snapshot;
                Ok(Told::Committed(orthodrome_client::Committed { timestamp, reads: Some(reads) }))
            }
        }
    }
}

/// Keeps asking every gateway for an outcome, and corrects the last attempt if it learns one.
async fn settle(doubt: InDoubt, seen: &mut [Seen]) -> Result<(), Failed> {
    let (known, result) = match doubt.resolve_within(DOUBT_MAX).await {
        Told::Committed(committed) => (Outcome::Committed(committed.timestamp), Ok(())),
        Told::Aborted(aborted) => {
            let reason = AbortReason::from(aborted.reason);
            (Outcome::Aborted(reason), Err(Failed::Aborted(reason.to_string())))
        }
        Told::Unknown(doubt) => {
            (Outcome::Unknown, Err(Failed::Unknown(doubt.trouble().to_owned())))
        }
    };
    if let Some(last) = seen.last_mut() {
        last.outcome = known;
        last.ended = Instant::now();
    }
    result
}

fn aborted(seen: &Seen) -> Option<AbortReason> {
    match seen.outcome {
        Outcome::Aborted(reason) => Some(reason),
        Outcome::Committed(_) | Outcome::Unknown => None,
    }
}

/// The keys that a request wrote if it committed with these reads, and whether it deleted them.
fn written(source: &Source, request: &Request, reads: &Reads) -> OrdMap<Key, bool> {
    let writes = match &request.kind {
        Kind::Interactive => match source.decide(request, reads) {
            Decision::Commit(writes) => Some(writes),
            Decision::Abort => None,
        },
        Kind::Procedure(ops) => Txn::execute(ops, reads).ok(),
        Kind::General | Kind::ReadOnly | Kind::StaleReadOnly => None,
    };
    let deleted = |(key, value): (Key, Option<Value>)| (key, value.is_none());
    writes.into_iter().flatten().map(deleted).collect()
}

impl Shared {
    /// Makes lines of the history and findings from the observations of a request.
    fn take_down(&self, source: &Source, request: &Request, seen: &[Seen], ended: &mut Ended) {
        let last = seen.last().map(|last| last.txn);
        for attempt in seen {
            let reads = attempt.reads.as_ref().map(|r| stripped(&self.prefix, r.as_map()));
            let is_whole = !(attempt.is_read_only && request.kind == Kind::General);
            if let (Outcome::Committed(_), Some(reads), true) = (attempt.outcome, &reads, is_whole)
                && let Err(finding) = source.audit(request, reads)
            {
                ended.findings.push(format!("{}: {finding}", attempt.txn));
            }
            if source.has_scans
                && let (Outcome::Committed(at), Some(reads)) = (attempt.outcome, &reads)
            {
                self.ranges.committed(at, attempt.txn, written(source, request, reads));
            }
            match self.line(source, request, attempt, reads.as_ref(), last) {
                Ok(entry) => ended.entries.push(entry),
                Err(broken) => ended.findings.push(broken.to_string()),
            }
            ended.reads = reads;
        }
    }

    fn line(
        &self,
        source: &Source,
        request: &Request,
        seen: &Seen,
        reads: Option<&Reads>,
        last: Option<TxnId>,
    ) -> Result<Entry, RecordError> {
        // Reconnaissance for a general transaction is a request of its own.
        let mut request = Cow::Borrowed(request);
        if seen.is_read_only && request.kind == Kind::General {
            let reads = reads.into_iter().flat_map(|reads| reads.keys().cloned()).collect();
            let all = request.to_mut();
            (all.kind, all.reads, all.writes) = (Kind::ReadOnly, reads, Vec::new());
        }
        let request = &*request;
        let time = |at: Instant| Time(nanos(at.saturating_duration_since(self.started)));
        let decision = match (&request.kind, reads) {
            (Kind::Interactive, Some(reads)) => Some(source.decide(request, reads)),
            // An attempt that ended before its last round made no decision.
            (Kind::General, Some(reads)) => match source.step(request, reads) {
                Step::Read(_) => None,
                Step::Decide(decision) => Some(decision),
            },
            (Kind::Interactive | Kind::General, None) => None,
            (Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly, _) => None,
        };
        let completed = match seen.outcome {
            Outcome::Unknown => None,
            // It committed, but its reads were lost with the first answer. Without reads it cannot
            // be checked as committed, so the history has it as unknown.
            Outcome::Committed(_) if reads.is_none() => None,
            outcome @ (Outcome::Committed(_) | Outcome::Aborted(_)) => {
                Some((time(seen.ended), outcome))
            }
        };
        let attempt = Attempt {
            request,
            txn: seen.txn,
            region: self.region_name(seen.home),
            invoked: time(seen.began),
            completed,
            reads,
            decision: decision.as_ref(),
            is_retried: last != Some(seen.txn),
        };
        entry(&attempt, source.values)
    }
}

/// A key with the prefix of this run, so that runs on one cluster use different keys.
pub fn prefixed(prefix: &str, key: &Key) -> Key {
    if prefix.is_empty() {
        return key.clone();
    }
    Key::from([prefix.as_bytes(), key.bytes()].concat())
}

fn stripped(prefix: &str, reads: &Reads) -> Reads {
    let strip = |(key, read): (&Key, &Read)| {
        let rest = if key.bytes().starts_with(prefix.as_bytes()) { prefix.len() } else { 0 };
        (Key::from(key.bytes().get(rest..).unwrap_or_default()), read.clone())
    };
    reads.iter().map(strip).collect()
}

fn moved(op: &Op, place: impl Fn(&Key) -> Key) -> Op {
    match op {
        Op::Get(key) => Op::Get(place(key)),
        Op::Compare(key, expected) => Op::Compare(place(key), expected.clone()),
        Op::Put(key, value) => Op::Put(place(key), value.clone()),
        Op::Add(key, amount) => Op::Add(place(key), *amount),
        Op::Append(key, value) => Op::Append(place(key), value.clone()),
        Op::Delete(key) => Op::Delete(place(key)),
        Op::Call(call) => Op::Call(Call {
            reads: call.reads.iter().map(&place).collect(),
            writes: call.writes.iter().map(&place).collect(),
            ..call.clone()
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_move_there_and_back() {
        let key = Key::from("account7");
        let there = prefixed("load-c4/", &key);
        assert_eq!(there, Key::from("load-c4/account7"));
        assert_eq!(prefixed("", &key), key);
        let reads = Reads::from([(there, Read::default())]);
        assert_eq!(stripped("load-c4/", &reads).into_keys().collect::<Vec<_>>(), [key]);
        let op = moved(&Op::Add("a".into(), 3), |key| prefixed("x/", key));
        assert_eq!(op, Op::Add("x/a".into(), 3));
    }
}
