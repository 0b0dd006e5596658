//! Commands that wait: `BLPOP`, `BRPOP`, `BLMOVE`, `BRPOPLPUSH`, `BZPOPMIN` and `BZPOPMAX`.
//!
//! Such a command runs at once. If its keys are empty, its client stands in line for each of them.
//! While a client of this node stands in line for a key, the node watches that key. When the key
//! changes, the first in line tries again; whoever leaves a line lets the next one try. So what is
//! pushed wakes one client of each node, and clients of one node get it in the order in which they
//! came.
//!
//! A watch shows changes from some moment on. A client tries once more when the watch of each of its
//! keys has begun, so it misses nothing. A watch that ends begins again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use orthodrome_core::Key;
use orthodrome_core::procedure::redis::number::Score;
use orthodrome_core::procedure::redis::reply::{Failure, Reply, SYNTAX};
use orthodrome_core::procedure::redis::{KeyName, wrong_arity};
use orthodrome_core::scan::KeyRange;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::connection::Connection;
use super::local::Local;
use super::messages::{self, Status};
use super::request::WORD_BYTES;
use super::run::stored;
use crate::backoff::Backoff;
use crate::scan::{Batches, ScanFailed};
use crate::service::Refusal;

/// Takes the first or last element of the first list that has one. With a second argument, keys of
/// another type are passed over: who waits already goes on waiting, as in Redis.
const POP: &str = "for _, key in ipairs(KEYS) do \
     local element = redis.pcall(ARGV[1], key) \
     if type(element) == 'table' then \
     if not ARGV[2] then return element end \
     elseif element then return {key, element} end \
     end return false";
/// Takes the member with the lowest or highest score of the first sorted set that has one; the same.
const POP_SCORED: &str = "for _, key in ipairs(KEYS) do \
     local pair = redis.pcall(ARGV[1], key) \
     if pair.err then \
     if not ARGV[2] then return pair end \
     elseif #pair > 0 then return {key, pair[1], pair[2]} end \
     end return false";

const NOT_A_TIME: Failure = Failure::new("ERR timeout is not a float or out of range");
const NEGATIVE: Failure = Failure::new("ERR timeout is negative");

/// The pauses before a watch that has ended begins again.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The longest wait with an end, as in Redis: what milliseconds since 1970 can count.
const WAIT_MAX: f64 = 9e15;

/// A command that waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wait {
    /// For the first element of one of several lists.
    First,
    /// For the last element.
    Last,
    /// Moves an element from one end of a list to one end of another.
    Move,
    /// Moves the last element of a list to the front of another.
    MoveLast,
    /// For the member with the lowest score of one of several sorted sets.
    Lowest,
    /// For the member with the highest score.
    Highest,
}

/// A client that stands in line.
#[derive(Debug, Default)]
struct Waiter {
    /// It is its turn to try.
    turn: Notify,
}

/// Those who wait for one key.
#[derive(Debug)]
struct Line {
    waiting: VecDeque<Arc<Waiter>>,
    /// Of the watch of the key.
    status: watch::Receiver<Status>,
    /// Tells this line from an earlier one for the same key.
    round: u64,
    _end: DropGuard,
}

impl Line {
    fn wake(&self) {
        if let Some(first) = self.waiting.front() {
            first.turn.notify_one();
        }
    }
}

/// The lines of a node.
#[derive(Debug, Default)]
pub(super) struct Lines {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    lines: BTreeMap<KeyName, Line>,
    round: u64,
}

impl Lines {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code that holds the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a client at the end of the line for `key`; the status of the watch of that key, which begins
    /// if nobody stood there.
    fn join(
        self: &Arc<Self>,
        key: &KeyName,
        waiter: &Arc<Waiter>,
        watch: impl FnOnce(KeyRange) -> Result<Batches, Failure>,
    ) -> Result<watch::Receiver<Status>, Failure> {
        let mut state = self.state();
        if let Some(line) = state.lines.get_mut(key) {
            line.waiting.push_back(Arc::clone(waiter));
            return Ok(line.status.clone());
        }
        let batches = watch(alone(key))?;
        let (status, receiver) = watch::channel(Status::Begins);
        let end = CancellationToken::new();
        state.round += 1;
        let round = state.round;
        let line = Line {
            waiting: VecDeque::from([Arc::clone(waiter)]),
            status: receiver.clone(),
            round,
            _end: end.clone().drop_guard(),
        };
        state.lines.insert(key.clone(), line);
        tokio::spawn(Arc::clone(self).follow((key.clone(), round), batches, status, end));
        Ok(receiver)
    }

    /// Takes a client out of the line for `key`. The next one tries: perhaps this one was woken.
    fn leave(&self, key: &KeyName, waiter: &Arc<Waiter>) {
        let mut state = self.state();
        let Some(line) = state.lines.get_mut(key) else { return };
        line.waiting.retain(|other| !Arc::ptr_eq(other, waiter));
        if line.waiting.is_empty() {
            state.lines.remove(key);
        } else {
            line.wake();
        }
    }

    /// Wakes the first in line whenever the key has a new value, until nobody waits or the watch fails.
    async fn follow(
        self: Arc<Self>,
        (key, round): (KeyName, u64),
        mut batches: Batches,
        status: watch::Sender<Status>,
        end: CancellationToken,
    ) {
        let failed = loop {
            let next = tokio::select! {
                () = end.cancelled() => return,
                next = batches.recv() => next,
            };
            match next {
                Some(Ok(batch)) => {
                    status.send_if_modified(|status| {
                        let begins = *status == Status::Begins;
                        if begins {
                            *status = Status::Runs;
                        }
                        begins
                    });
                    if batch.changes.iter().any(|change| change.value.is_some())
                        && let Some(line) = self.state().lines.get(&key)
                        && line.round == round
                    {
                        line.wake();
                    }
                }
                Some(Err(failed)) => break failed.to_string(),
                None => break "it ended".to_owned(),
            }
        };
        tracing::debug!(%failed, "the watch of a key for which clients wait ended");
        let mut state = self.state();
        if state.lines.get(&key).is_some_and(|line| line.round == round) {
            state.lines.remove(&key);
        }
        drop(state);
        let text = format!("ERR the watch of the key ended, try again: {failed}");
        status.send_replace(Status::Failed(Failure::of(text)));
    }
}

/// The range of one key.
fn alone(key: &KeyName) -> KeyRange {
    let from = stored(key);
    let until = [from.bytes(), &[0]].concat();
    KeyRange { from, until: Some(Key::from(until)) }
}

/// A place in the lines for some keys; it is given up when this is dropped.
#[derive(Debug)]
struct Place {
    lines: Arc<Lines>,
    waiter: Arc<Waiter>,
    /// Each with the status of its watch.
    keys: Vec<(KeyName, watch::Receiver<Status>)>,
}

impl Drop for Place {
    fn drop(&mut self) {
        for (key, _) in &self.keys {
            self.lines.leave(key, &self.waiter);
        }
    }
}

/// A command that waits for its turn.
#[derive(Debug)]
pub(super) struct Waiting {
    wait: Wait,
    /// What it runs when it is its turn.
    words: Vec<Bytes>,
    keys: Vec<KeyName>,
    deadline: Option<Instant>,
    backoff: Backoff,
    /// None after a watch has ended, until the pause is over.
    place: Option<Place>,
    /// When it stands in line again.
    again_at: Instant,
    /// The watches of this number of its keys have begun.
    begun: usize,
}

/// What a client that waits does next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Perhaps something has come before the watches began.
    Look,
    /// It tries again.
    Try,
    /// It stands in line again, because a watch has ended.
    Join,
    /// It has waited for as long as it wanted.
    GiveUp,
}

impl Waiting {
    /// The bytes that it keeps.
    pub(super) fn bytes(&self) -> usize {
        let words = self.words.iter().map(|word| word.len() + WORD_BYTES);
        let keys = self.keys.iter().map(|(_, name)| name.len() * 2 + KEY_BYTES);
        words.chain(keys).sum()
    }

    /// Waits until there is something to do. It can be dropped and called again.
    pub(super) async fn next(&mut self) -> Next {
        let deadline = async {
            match self.deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let Some(place) = &mut self.place else {
            return tokio::select! {
                () = deadline => Next::GiveUp,
                () = tokio::time::sleep_until(self.again_at) => Next::Join,
            };
        };
        let Place { waiter, keys, .. } = place;
        let all = keys.len();
        let mut begun = self.begun;
        let begin = async {
            while let Some((_, status)) = keys.get_mut(begun) {
                let status = status.wait_for(|status| *status != Status::Begins).await;
                match status.map(|status| status.clone()) {
                    Ok(Status::Runs | Status::Begins) => begun += 1,
                    Ok(Status::Failed(_)) | Err(_) => return Next::Join,
                }
            }
            if begun > all {
                // It has looked since all watches have begun.
                let ends = keys
                    .iter_mut()
                    .map(|(_, status)| Box::pin(status.wait_for(|status| *status != Status::Runs)));
                ended(ends.collect()).await;
                return Next::Join;
            }
            begun += 1;
            Next::Look
        };
        let next = tokio::select! {
            () = deadline => Next::GiveUp,
            () = waiter.turn.notified() => Next::Try,
            next = begin => next,
        };
        self.begun = begun;
        next
    }
}

/// Waits until one of these is ready.
async fn ended<F: Future + Unpin>(mut all: Vec<F>) {
    std::future::poll_fn(|context| {
        let is_ready = all.iter_mut().any(|one| std::pin::Pin::new(one).poll(context).is_ready());
        if is_ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// What a key for which a client waits counts besides its name.
const KEY_BYTES: usize = 256;

/// The time that a client wants to wait, in seconds; none without an end.
fn span(text: &[u8]) -> Result<Option<Duration>, Failure> {
    let seconds = std::str::from_utf8(text).ok().and_then(|text| text.parse::<f64>().ok());
    let seconds = seconds.filter(|seconds| !seconds.is_nan()).ok_or(NOT_A_TIME)?;
    if seconds < 0.0 || seconds * 1_000.0 > WAIT_MAX {
        return Err(NEGATIVE);
    }
    Ok((seconds > 0.0).then(|| Duration::from_secs_f64(seconds)))
}

impl Wait {
    fn name(self) -> &'static str {
        Local::Wait(self).name()
    }

    /// The first and the last word that is a key, and the step between them, as `COMMAND` says it.
    pub(super) fn key_places(self) -> (i64, i64, i64) {
        match self {
            Self::Move | Self::MoveLast => (1, 2, 1),
            Self::First | Self::Last | Self::Lowest | Self::Highest => (1, -2, 1),
        }
    }

    /// What it runs, and the keys for which it waits.
    fn words(self, arguments: &[Bytes]) -> Result<(Vec<Bytes>, Vec<Bytes>), Failure> {
        let word = |text: &'static str| Bytes::from_static(text.as_bytes());
        let popped = |script, command| {
            let many = Bytes::from(arguments.len().to_string());
            let mut words = vec![word("eval"), word(script), many];
            words.extend_from_slice(arguments);
            words.push(word(command));
            Ok((words, arguments.to_vec()))
        };
        match (self, arguments) {
            (Self::First, [_, ..]) => popped(POP, "lpop"),
            (Self::Last, [_, ..]) => popped(POP, "rpop"),
            (Self::Lowest, [_, ..]) => popped(POP_SCORED, "zpopmin"),
            (Self::Highest, [_, ..]) => popped(POP_SCORED, "zpopmax"),
            (Self::Move, [from, to, end, other]) => {
                let words =
                    vec![word("lmove"), from.clone(), to.clone(), end.clone(), other.clone()];
                Ok((words, vec![from.clone()]))
            }
            (Self::MoveLast, [from, to]) => {
                Ok((vec![word("rpoplpush"), from.clone(), to.clone()], vec![from.clone()]))
            }
            (Self::First | Self::Last | Self::Lowest | Self::Highest, [])
            | (Self::Move | Self::MoveLast, _) => Err(SYNTAX),
        }
    }

    /// The answer, if it found something.
    fn answer(self, found: Reply) -> Option<Reply> {
        match (self, found) {
            (_, Reply::Nil | Reply::NilArray) => None,
            (Self::Lowest | Self::Highest, Reply::Array(mut items)) => {
                if let Some(last) = items.last_mut()
                    && let Reply::Bulk(text) = last
                    && let Some(score) = Score::parse(text)
                {
                    *last = Reply::Double(score);
                }
                Some(Reply::Array(items))
            }
            (_, found) => Some(found),
        }
    }
}

impl Connection {
    /// A command that waits: its answer, or its client waits from now on.
    pub(super) async fn begin_to_wait(&mut self, wait: Wait, arguments: &[Bytes]) {
        let name = wait.name();
        let answer = match self.try_to_wait(wait, name, arguments).await {
            Ok(None) => return,
            Ok(Some(answer)) => answer,
            Err(failure) => Reply::Error(failure),
        };
        self.end_wait(name, &answer);
    }

    async fn try_to_wait(
        &mut self,
        wait: Wait,
        name: &'static str,
        arguments: &[Bytes],
    ) -> Result<Option<Reply>, Failure> {
        let front = self.runner.front();
        if !self.caller.as_deref().is_some_and(|caller| front.may(caller, true)) {
            return Err(Failure::of(format!(
                "NOPERM this user has no permissions to run the '{name}' command"
            )));
        }
        let (time, arguments) = arguments.split_last().ok_or_else(|| wrong_arity(name))?;
        let (mut words, names) = wait.words(arguments)?;
        let deadline = match span(time)? {
            None => None,
            Some(span) => Instant::now().checked_add(span),
        };
        if let Some(answer) = wait.answer(self.run_alone(&words).await) {
            return Ok(Some(answer));
        }
        let mut keys: Vec<KeyName> = names.into_iter().map(|name| (self.database, name)).collect();
        if !matches!(wait, Wait::Move | Wait::MoveLast) {
            words.push(Bytes::from_static(b"later"));
        }
        keys.sort();
        keys.dedup();
        let backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
        let again_at = Instant::now();
        let mut waiting =
            Waiting { wait, words, keys, deadline, backoff, place: None, again_at, begun: 0 };
        self.join_lines(&mut waiting, name)?;
        self.waiting = Some(waiting);
        Ok(None)
    }

    /// Stands in line for each key.
    fn join_lines(&self, waiting: &mut Waiting, name: &'static str) -> Result<(), Failure> {
        let Some(caller) = &self.caller else { return Err(SYNTAX) };
        let front = self.runner.front();
        let watch = |range| match front.watch(caller, range) {
            Ok(Ok(batches)) => Ok(batches),
            Ok(Err(failed @ ScanFailed::Unsupported)) => Err(messages::refused(name, &failed)),
            Ok(Err(failed)) => Err(Failure::of(format!("ERR the key cannot be watched: {failed}"))),
            Err(Refusal::Denied(why)) => Err(Failure::of(format!("NOPERM {why}"))),
            Err(Refusal::Busy(why) | Refusal::Never(why)) => Err(Failure::of(format!("ERR {why}"))),
        };
        let lines = Arc::clone(self.runner.lines());
        let waiter = Arc::new(Waiter::default());
        let mut place = Place { lines, waiter, keys: Vec::new() };
        for key in &waiting.keys {
            let status = place.lines.join(key, &place.waiter, watch)?;
            place.keys.push((key.clone(), status));
        }
        (waiting.place, waiting.begun) = (Some(place), 0);
        Ok(())
    }

    /// A client that waits has something to do.
    pub(super) async fn go_on_waiting(&mut self, next: Next) {
        let Some(mut waiting) = self.waiting.take() else { return };
        let name = waiting.wait.name();
        match next {
            Next::GiveUp => self.end_wait(name, &Reply::NilArray),
            Next::Look if !self.exists(&waiting.keys).await => self.waiting = Some(waiting),
            Next::Look | Next::Try => {
                match waiting.wait.answer(self.run_alone(&waiting.words).await) {
                    Some(answer) => self.end_wait(name, &answer),
                    None => self.waiting = Some(waiting),
                }
            }
            Next::Join if waiting.place.is_some() => {
                waiting.place = None;
                waiting.again_at = Instant::now() + waiting.backoff.pause();
                self.waiting = Some(waiting);
            }
            Next::Join => {
                if self.join_lines(&mut waiting, name).is_err() {
                    waiting.again_at = Instant::now() + waiting.backoff.pause();
                }
                self.waiting = Some(waiting);
            }
        }
    }

    /// Whether one of these keys exists, or that cannot be told. Unlike an attempt to take something, this
    /// is in nobody's way.
    async fn exists(&mut self, keys: &[KeyName]) -> bool {
        let mut words = vec![Bytes::from_static(b"exists")];
        words.extend(keys.iter().map(|(_, name)| name.clone()));
        self.run_alone(&words).await != Reply::Integer(0)
    }

    fn end_wait(&mut self, name: &'static str, answer: &Reply) {
        self.runner.front().count_redis(name, matches!(answer, Reply::Error(_)));
        self.write(answer);
    }
}
