//! Messages: the clients of this node that have subscribed to channels, and the one watch that
//! finds what transactions of all nodes publish.
//!
//! A message is a change of the key of its channel
//! ([`orthodrome_core::procedure::redis::messages`]). While a client of the node has a
//! subscription, the node watches the keys of all channels. It passes every message to the inboxes
//! of the clients that have subscribed. It never waits for a client: a client whose inbox is full
//! loses its connection.
//!
//! A subscription counts from the moment at which it is added here. It is confirmed when the watch
//! has begun, so whoever publishes after the confirmation is heard. If the watch ends, messages may
//! be missed. Then every subscriber loses its connection, which it notices.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use orthodrome_core::Key;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::procedure::redis::messages::{CHANNELS, SHARD_CHANNELS, published};
use orthodrome_core::procedure::redis::reply::Failure;
use orthodrome_core::scan::KeyRange;
use orthodrome_core::watch::{Batch, Change};
use tokio::sync::{Notify, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::glob::Pattern;
use super::run::prefix;
use crate::scan::Batches;

/// The most messages that wait for one client.
const INBOX_MESSAGES_MAX: usize = 32_768;
/// The most bytes of messages that wait for one client.
const INBOX_BYTES_MAX: usize = 8 << 20;
/// The most bytes of messages that wait at a node. A message that waits for several clients counts
/// once.
const WAITING_BYTES_MAX: usize = 256 << 20;
/// What a message counts besides its bytes.
const MESSAGE_BYTES: usize = 128;
/// The most subscriptions of one client.
pub(super) const SUBSCRIPTIONS_MAX: usize = 65_536;
/// The most patterns of one client. Every message is compared with all patterns.
pub(super) const PATTERNS_MAX: usize = 1_024;
/// What a subscription counts besides the name of its channel.
const SUBSCRIPTION_BYTES: usize = 256;
/// After this number of transactions, other tasks get their turn.
const TURN: usize = 32;

/// What a client subscribes to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Kind {
    /// A channel, with `SUBSCRIBE`.
    Channel,
    /// All channels whose names match a pattern, with `PSUBSCRIBE`.
    Pattern,
    /// A channel of its own kind, with `SSUBSCRIBE`.
    Shard,
}

impl Kind {
    /// The first word of a confirmation.
    pub(super) const fn added(self) -> &'static str {
        match self {
            Self::Channel => "subscribe",
            Self::Pattern => "psubscribe",
            Self::Shard => "ssubscribe",
        }
    }

    /// The first word of the confirmation of an end.
    pub(super) const fn removed(self) -> &'static str {
        match self {
            Self::Channel => "unsubscribe",
            Self::Pattern => "punsubscribe",
            Self::Shard => "sunsubscribe",
        }
    }
}

/// A message that was published. It counts among those that wait until the last client has it.
#[derive(Debug)]
struct Message {
    channel: Bytes,
    text: Bytes,
    is_shard: bool,
    waiting: Arc<AtomicUsize>,
}

impl Message {
    fn bytes(&self) -> usize {
        self.channel.len() + self.text.len() + MESSAGE_BYTES
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.bytes(), Ordering::Relaxed);
    }
}

/// A message for one client.
#[derive(Debug)]
pub(super) struct Delivery {
    message: Arc<Message>,
    /// The pattern that the channel matches.
    pattern: Option<Bytes>,
}

impl Delivery {
    fn bytes(&self) -> usize {
        self.message.bytes() + self.pattern.as_ref().map_or(0, Bytes::len)
    }

    /// The words of the message.
    pub(super) fn words(&self) -> Vec<Bytes> {
        let word = |text: &'static str| Bytes::from_static(text.as_bytes());
        let Message { channel, text, is_shard, .. } = &*self.message;
        match &self.pattern {
            Some(pattern) => {
                vec![word("pmessage"), pattern.clone(), channel.clone(), text.clone()]
            }
            None => {
                let first = if *is_shard { "smessage" } else { "message" };
                vec![word(first), channel.clone(), text.clone()]
            }
        }
    }
}

/// The messages that wait for one client.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    queue: Mutex<Queue>,
    arrived: Notify,
    /// Cancelled when the client must lose its connection.
    ended: CancellationToken,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Delivery>,
    /// Bytes of those that wait, and of those that are being sent.
    bytes: usize,
    /// Bytes of those that are being sent.
    sending: usize,
}

/// Locks. No code that holds one of these locks can leave the state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inbox {
    /// Adds a message. If there is no room, the client loses its connection.
    fn push(&self, delivery: Delivery) {
        if self.ended.is_cancelled() {
            return;
        }
        let mut queue = lock(&self.queue);
        let bytes = queue.bytes.saturating_add(delivery.bytes());
        if bytes > INBOX_BYTES_MAX || queue.waiting.len() >= INBOX_MESSAGES_MAX {
            drop(queue);
            self.end();
            return;
        }
        queue.bytes = bytes;
        queue.waiting.push_back(delivery);
        drop(queue);
        self.arrived.notify_one();
    }

    /// Drops what waits. The client loses its connection.
    fn end(&self) {
        self.ended.cancel();
        lock(&self.queue).waiting.clear();
    }

    /// The next messages, of `bytes_max` bytes or one more message.
    pub(super) fn take(&self, bytes_max: usize) -> Vec<Delivery> {
        let mut queue = lock(&self.queue);
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while bytes < bytes_max
            && let Some(delivery) = queue.waiting.pop_front()
        {
            bytes += delivery.bytes();
            taken.push(delivery);
        }
        queue.sending += bytes;
        taken
    }

    /// The messages that were taken have been sent.
    pub(super) fn sent(&self) {
        let mut queue = lock(&self.queue);
        queue.bytes = queue.bytes.saturating_sub(std::mem::take(&mut queue.sending));
    }

    /// Waits for a message.
    pub(super) async fn message(&self) {
        while lock(&self.queue).waiting.is_empty() {
            self.arrived.notified().await;
        }
    }

    /// Waits until the client must lose its connection.
    pub(super) async fn ended(&self) {
        self.ended.cancelled().await;
    }

    /// True if the client must lose its connection.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    fn waiting_bytes(&self) -> usize {
        lock(&self.queue).bytes
    }
}

/// Whether a watch has begun.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Status {
    /// Not yet.
    Begins,
    /// Everything that is published from now on will be found.
    Runs,
    /// It has ended.
    Failed(Failure),
}

impl Status {
    /// The first batch of a watch has arrived, or another one.
    pub(super) fn run(status: &watch::Sender<Self>) {
        status.send_if_modified(|status| {
            let begins = *status == Self::Begins;
            if begins {
                *status = Self::Runs;
            }
            begins
        });
    }
}

/// A watch. It ends when this is dropped.
#[derive(Debug)]
struct Run {
    status: watch::Receiver<Status>,
    _end: DropGuard,
}

/// The subscriptions of the clients of a node.
#[derive(Debug, Default)]
pub(super) struct Hub {
    state: Mutex<State>,
    /// The bytes of messages that wait.
    waiting: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct State {
    /// By the numbers of the connections.
    inboxes: OrdMap<u64, Arc<Inbox>>,
    channels: OrdMap<Bytes, OrdSet<u64>>,
    shards: OrdMap<Bytes, OrdSet<u64>>,
    patterns: OrdMap<Bytes, (Pattern, OrdSet<u64>)>,
    /// The watch; none without subscribers.
    run: Option<Run>,
    /// The number of the last watch.
    round: u64,
}

impl State {
    fn add(&mut self, kind: Kind, name: &Bytes, pattern: Option<Pattern>, number: u64) {
        let (name, of) = (
            name.clone(),
            match kind {
                Kind::Channel => &mut self.channels,
                Kind::Shard => &mut self.shards,
                Kind::Pattern => {
                    if let Some(pattern) = pattern {
                        let entry = self.patterns.entry(name.clone());
                        entry.or_insert_with(|| (pattern, OrdSet::new())).1.insert(number);
                    }
                    return;
                }
            },
        );
        of.entry(name).or_default().insert(number);
    }

    fn remove(&mut self, kind: Kind, name: &Bytes, number: u64) {
        let of = match kind {
            Kind::Channel => &mut self.channels,
            Kind::Shard => &mut self.shards,
            Kind::Pattern => {
                if let Some((_, numbers)) = self.patterns.get_mut(name) {
                    numbers.remove(&number);
                    if numbers.is_empty() {
                        self.patterns.remove(name);
                    }
                }
                return;
            }
        };
        if let Some(numbers) = of.get_mut(name) {
            numbers.remove(&number);
            if numbers.is_empty() {
                of.remove(name);
            }
        }
    }

    /// The numbers of those who have subscribed to a channel.
    fn direct(&self, channel: &[u8], is_shard: bool) -> impl Iterator<Item = u64> {
        let of = if is_shard { &self.shards } else { &self.channels };
        of.get(channel).into_iter().flatten().copied()
    }

    /// The patterns that a channel matches, with the numbers of those who have subscribed to them.
    fn matching(
        &self,
        channel: &[u8],
        is_shard: bool,
    ) -> impl Iterator<Item = (&Bytes, &OrdSet<u64>)> {
        let all = self.patterns.iter().filter(move |_| !is_shard);
        all.filter(|(_, (pattern, _))| pattern.matches(channel))
            .map(|(text, (_, numbers))| (text, numbers))
    }

    fn deliver(&self, message: &Arc<Message>) {
        let to = |number: &u64, pattern: Option<&Bytes>| {
            if let Some(inbox) = self.inboxes.get(number) {
                let (message, pattern) = (Arc::clone(message), pattern.cloned());
                inbox.push(Delivery { message, pattern });
            }
        };
        self.direct(&message.channel, message.is_shard).for_each(|number| to(&number, None));
        for (pattern, numbers) in self.matching(&message.channel, message.is_shard) {
            numbers.iter().for_each(|number| to(number, Some(pattern)));
        }
    }

    /// Ends the connection for which the most bytes wait.
    fn end_slowest(&self) {
        let slowest = self.inboxes.values().filter(|inbox| !inbox.has_ended());
        if let Some(inbox) = slowest.max_by_key(|inbox| inbox.waiting_bytes()) {
            inbox.end();
        }
    }
}

/// The keys of all channels.
fn range() -> KeyRange {
    let (first, last) = (prefix(CHANNELS), prefix(SHARD_CHANNELS));
    let until = KeyRange::prefix(last.as_bytes()).until;
    KeyRange { from: Key::from(first.into_bytes()), until }
}

/// The channel of a key, and whether it is one for `SPUBLISH`.
fn channel(key: &Key) -> Option<(Bytes, bool)> {
    [(CHANNELS, false), (SHARD_CHANNELS, true)].into_iter().find_map(|(database, is_shard)| {
        let name = key.bytes().strip_prefix(prefix(database).as_bytes())?;
        Some((Bytes::copy_from_slice(name), is_shard))
    })
}

/// What one transaction published on one channel.
struct Channel {
    name: Bytes,
    is_shard: bool,
    messages: Vec<(u32, Bytes)>,
}

fn on_channel(change: &Change) -> Option<Channel> {
    let (name, is_shard) = channel(&change.key)?;
    let messages = published(change.value.as_ref()?)?;
    Some(Channel { name, is_shard, messages })
}

impl Hub {
    /// The number of clients that receive a message on a channel; twice if it matches twice.
    pub(super) fn receivers(&self, database: u8, channel: &[u8]) -> usize {
        let is_shard = database == SHARD_CHANNELS;
        let state = lock(&self.state);
        let matching = state.matching(channel, is_shard).map(|(_, numbers)| numbers.len());
        state.direct(channel, is_shard).count() + matching.sum::<usize>()
    }

    /// The channels that have subscribers; those that match a pattern, if there is one.
    pub(super) fn channels(&self, is_shard: bool, pattern: Option<&Pattern>) -> Vec<Bytes> {
        let state = lock(&self.state);
        let of = if is_shard { &state.shards } else { &state.channels };
        let is_wanted =
            |name: &&Bytes| pattern.is_none_or(|pattern: &Pattern| pattern.matches(name));
        of.keys().filter(is_wanted).cloned().collect()
    }

    /// The number of clients that have subscribed to a channel by its name.
    pub(super) fn subscribers(&self, is_shard: bool, channel: &[u8]) -> usize {
        lock(&self.state).direct(channel, is_shard).count()
    }

    /// The numbers of channels, patterns and shard channels that have subscribers.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        let state = lock(&self.state);
        (state.channels.len(), state.patterns.len(), state.shards.len())
    }

    /// Takes the results of a watch until nobody needs it, or until it fails.
    async fn follow(
        self: Arc<Self>,
        mut batches: Batches,
        (round, status): (u64, watch::Sender<Status>),
        end: CancellationToken,
    ) {
        loop {
            let next = tokio::select! {
                () = end.cancelled() => return,
                next = batches.recv() => next,
            };
            let failed = match next {
                Some(Ok(batch)) => {
                    // From now on it misses nothing.
                    Status::run(&status);
                    self.deliver(round, &batch).await;
                    continue;
                }
                Some(Err(failed)) => failed.to_string(),
                None => "it ended".to_owned(),
            };
            tracing::warn!(%failed, "the watch of messages ended; subscribers are disconnected");
            return self.fail(round, &status, &failed);
        }
    }

    /// Passes on what a batch has. The messages of one transaction keep their order.
    async fn deliver(&self, round: u64, batch: &Batch) {
        for (count, changes) in batch.changes.chunk_by(|a, b| a.version == b.version).enumerate() {
            let mut all = Vec::new();
            for Channel { name, is_shard, messages } in changes.iter().filter_map(on_channel) {
                let of = |(place, text): (u32, Bytes)| (place, name.clone(), is_shard, text);
                all.extend(messages.into_iter().map(of));
            }
            all.sort_by_key(|(place, ..)| *place);
            if !self.deliver_all(round, all) {
                return;
            }
            if count % TURN == TURN - 1 {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Passes on messages; false if another watch has begun.
    fn deliver_all(&self, round: u64, messages: Vec<(u32, Bytes, bool, Bytes)>) -> bool {
        let state = lock(&self.state);
        if state.round != round {
            return false;
        }
        for (_, channel, is_shard, text) in messages {
            // Of its own: it is a part of a larger value.
            let text = Bytes::copy_from_slice(&text);
            let waiting = Arc::clone(&self.waiting);
            let message = Arc::new(Message { channel, text, is_shard, waiting });
            self.waiting.fetch_add(message.bytes(), Ordering::Relaxed);
            state.deliver(&message);
            drop(message);
            if self.waiting.load(Ordering::Relaxed) > WAITING_BYTES_MAX {
                state.end_slowest();
            }
        }
        true
    }

    /// The watch has ended. Those whose subscriptions it had confirmed lose their connections.
    fn fail(&self, round: u64, status: &watch::Sender<Status>, why: &str) {
        let mut state = lock(&self.state);
        if state.round != round {
            return;
        }
        let had_begun = *status.borrow() == Status::Runs;
        for inbox in std::mem::take(&mut state.inboxes).into_values().filter(|_| had_begun) {
            inbox.end();
        }
        *state = State { round: round + 1, ..State::default() };
        let text = format!("ERR the watch of messages did not begin, try again: {why}");
        status.send_replace(Status::Failed(Failure::of(text)));
    }
}

/// The subscriptions of one client. They end when this is dropped.
#[derive(Debug)]
pub(super) struct Subscriber {
    hub: Arc<Hub>,
    /// Of its connection.
    number: u64,
    inbox: Arc<Inbox>,
    names: OrdSet<(Kind, Bytes)>,
    patterns: usize,
    shards: usize,
    bytes: usize,
}

impl Subscriber {
    pub(super) fn new(hub: Arc<Hub>, number: u64) -> Self {
        let (inbox, names) = (Arc::default(), OrdSet::new());
        Self { hub, number, inbox, names, patterns: 0, shards: 0, bytes: 0 }
    }

    pub(super) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// The bytes that its subscriptions take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of its subscriptions.
    pub(super) fn total(&self) -> usize {
        self.names.len()
    }

    /// The number of its channels, of its patterns, and of its shard channels.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        (self.names.len() - self.patterns - self.shards, self.patterns, self.shards)
    }

    /// The number in a confirmation: of channels and patterns, or of shard channels.
    pub(super) fn shown(&self, kind: Kind) -> usize {
        match kind {
            Kind::Channel | Kind::Pattern => self.names.len() - self.shards,
            Kind::Shard => self.shards,
        }
    }

    /// The names to which it has subscribed in this way.
    pub(super) fn names(&self, kind: Kind) -> Vec<Bytes> {
        let own = self.names.iter().filter(|(own, _)| *own == kind);
        own.map(|(_, name)| name.clone()).collect()
    }

    /// Begins the watch if it does not run; its status. Call it before [`Subscriber::add`].
    ///
    /// # Errors
    /// The watch cannot begin.
    pub(super) fn begin(
        &self,
        watch: impl FnOnce(KeyRange) -> Result<Batches, Failure>,
    ) -> Result<watch::Receiver<Status>, Failure> {
        let mut state = lock(&self.hub.state);
        if state.run.is_none() {
            let batches = watch(range())?;
            let (status, receiver) = watch::channel(Status::Begins);
            let end = CancellationToken::new();
            state.round += 1;
            let following = (state.round, status);
            tokio::spawn(Arc::clone(&self.hub).follow(batches, following, end.clone()));
            state.run = Some(Run { status: receiver, _end: end.drop_guard() });
        }
        state.inboxes.insert(self.number, Arc::clone(&self.inbox));
        let status = state.run.as_ref().map(|run| run.status.clone());
        drop(state);
        status.ok_or(Failure::new("ERR the watch of messages did not begin, try again"))
    }

    /// Adds a subscription; false if it has it already.
    pub(super) fn add(&mut self, kind: Kind, name: &Bytes, pattern: Option<Pattern>) -> bool {
        if !self.names.insert((kind, name.clone())) {
            return false;
        }
        self.count(kind, true);
        self.bytes += cost(kind, name);
        lock(&self.hub.state).add(kind, name, pattern, self.number);
        true
    }

    /// Removes a subscription, if there is one.
    pub(super) fn remove(&mut self, kind: Kind, name: &Bytes) {
        if self.names.remove(&(kind, name.clone())) {
            self.count(kind, false);
            self.bytes = self.bytes.saturating_sub(cost(kind, name));
            lock(&self.hub.state).remove(kind, name, self.number);
        }
    }

    fn count(&mut self, kind: Kind, is_more: bool) {
        let of = match kind {
            Kind::Channel => return,
            Kind::Pattern => &mut self.patterns,
            Kind::Shard => &mut self.shards,
        };
        *of = if is_more { *of + 1 } else { of.saturating_sub(1) };
    }
}

/// The bytes that a subscription counts. A pattern counts the table of its matcher, too.
fn cost(kind: Kind, name: &Bytes) -> usize {
    let matcher = if kind == Kind::Pattern { Pattern::table_bytes(name.len()) } else { 0 };
    2 * name.len() + SUBSCRIPTION_BYTES + matcher
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        let mut state = lock(&self.hub.state);
        for (kind, name) in &self.names {
            state.remove(*kind, name, self.number);
        }
        state.inboxes.remove(&self.number);
        if state.inboxes.is_empty() {
            // Nobody needs the watch.
            state.run = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::Timestamp;
    use orthodrome_core::procedure::redis::entry::{Content, Entry, Stamp};
    use orthodrome_core::txn::Version;
    use orthodrome_core::{ClientId, TxnId};
    use tokio::sync::mpsc;

    use super::*;
    use crate::scan::ScanFailed;

    /// A subscriber to these channels, with a watch that has begun.
    async fn subscriber(
        hub: &Arc<Hub>,
        number: u64,
        channels: &[&str],
    ) -> (Subscriber, Option<mpsc::Sender<Result<Batch, ScanFailed>>>) {
        let mut own = Subscriber::new(Arc::clone(hub), number);
        let mut batches = None;
        let begun = own.begin(|_| {
            let (sender, receiver) = mpsc::channel(4);
            sender.try_send(Ok(Batch::default())).unwrap();
            batches = Some(sender);
            Ok(receiver)
        });
        for channel in channels {
            assert!(own.add(Kind::Channel, &Bytes::copy_from_slice(channel.as_bytes()), None));
        }
        begun.unwrap().wait_for(|status| *status == Status::Runs).await.unwrap();
        (own, batches)
    }

    fn messages(count: usize, text: &Bytes) -> Vec<(u32, Bytes, bool, Bytes)> {
        (0..count).map(|_| (0, Bytes::from("a"), false, text.clone())).collect()
    }

    #[tokio::test]
    async fn an_inbox_is_bounded_in_messages_and_in_bytes() {
        let hub = Arc::new(Hub::default());
        let (own, _batches) = subscriber(&hub, 1, &["a"]).await;
        let round = lock(&hub.state).round;
        hub.deliver_all(round, messages(INBOX_MESSAGES_MAX, &Bytes::new()));
        assert!(!own.inbox().has_ended());
        hub.deliver_all(round, messages(1, &Bytes::new()));
        assert!(own.inbox().has_ended(), "one more than the bound");
        let (large, _) = subscriber(&hub, 2, &["a"]).await;
        let text = Bytes::from(vec![b'x'; 1 << 20]);
        hub.deliver_all(round, messages(7, &text));
        assert!(!large.inbox().has_ended());
        // What is being sent counts until it has been sent.
        assert_eq!(large.inbox().take(usize::MAX).len(), 7);
        large.inbox().sent();
        hub.deliver_all(round, messages(7, &text));
        assert_eq!(large.inbox().take(usize::MAX).len(), 7);
        assert!(!large.inbox().has_ended());
        hub.deliver_all(round, messages(1, &text));
        assert!(large.inbox().has_ended(), "7 are being sent, and 1 waits");
        hub.deliver_all(round, messages(1, &text));
        assert!(large.inbox().take(usize::MAX).is_empty());
        drop((own, large));
        assert_eq!(hub.waiting.load(Ordering::Relaxed), 0, "nothing waits any more");
        assert_eq!(hub.counts(), (0, 0, 0));
    }

    #[tokio::test]
    async fn when_too_much_waits_at_a_node_the_slowest_client_goes() {
        let hub = Arc::new(Hub::default());
        let (one, _batches) = subscriber(&hub, 1, &["a"]).await;
        let (two, _) = subscriber(&hub, 2, &["a", "b"]).await;
        let round = lock(&hub.state).round;
        let mut all = messages(3, &Bytes::from("x"));
        all.push((0, "b".into(), false, "y".into()));
        hub.deliver_all(round, all);
        let counted = hub.waiting.load(Ordering::Relaxed);
        assert_eq!(counted, 4 * (2 + MESSAGE_BYTES), "a message for two counts once");
        lock(&hub.state).end_slowest();
        assert!(two.inbox().has_ended() && !one.inbox().has_ended());
        lock(&hub.state).end_slowest();
        assert!(one.inbox().has_ended());
    }

    /// The batch of one transaction that publishes `text` on `a`.
    fn batch(timestamp: u64, text: &str) -> Batch {
        let element = [&0_u32.to_be_bytes(), text.as_bytes()].concat();
        let content = Content::List([Bytes::from(element)].into());
        let entry = Entry { stamp: Stamp::default(), expires_ms: 0, content };
        let writer = TxnId::new(ClientId(1), timestamp);
        let version = Version { timestamp: Timestamp(timestamp), writer };
        let key = Key::from(format!("{}a", prefix(CHANNELS)).into_bytes());
        let changes = vec![Change { key, version, value: Some(entry.encode()) }];
        Batch { changes, through: Timestamp(timestamp) }
    }

    #[tokio::test]
    async fn a_watch_that_another_one_replaced_delivers_nothing() {
        let hub = Arc::new(Hub::default());
        let (first, old) = subscriber(&hub, 1, &["a"]).await;
        let before = lock(&hub.state).round;
        drop(first);
        old.unwrap().closed().await;
        let (second, new) = subscriber(&hub, 2, &["a"]).await;
        // The task of the first watch was in the middle of a batch.
        hub.deliver(before, &batch(1, "old")).await;
        let new = new.unwrap();
        new.send(Ok(batch(2, "new"))).await.unwrap();
        second.inbox().message().await;
        let words = second.inbox().take(usize::MAX).iter().map(Delivery::words).collect::<Vec<_>>();
        assert_eq!(words, [["message", "a", "new"].map(Bytes::from).to_vec()]);
    }
}
