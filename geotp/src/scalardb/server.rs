//! A source as ScalarDB uses it: a store of records that can be read and conditionally changed one
//! by one. It knows nothing about transactions. A source may also have rows of the coordinator
//! table.

use std::fmt;
use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::machine::{Cx, Input, Leak, Machine, Setup};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Value, Version};

use super::message::{Image, Mark, Msg, Record, State};
use super::{Config, Note, ScalarDb, Stored};

/// A source.
#[derive(Debug)]
pub struct Server {
    config: Arc<Config>,
    /// Committed records in one table, states of transactions in the other.
    data: Store,
    /// Prepared records: the transaction, and the new value if it commits.
    prepared: OrdMap<Key, (Mark, Option<Value>)>,
    /// Rows whose last change is not durable yet.
    fresh: OrdMap<Row, Ticket>,
    /// Answers that wait for rows to be durable: an observed state never reverts.
    held: OrdMap<Ticket, Vec<(NodeId, Msg)>>,
    records: u32,
    checkpoint: Option<Ticket>,
}

/// A unit that can be changed atomically.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Row {
    Record(Key),
    State(TxnId),
}

/// All records are one table.
const RECORDS: PartitionId = PartitionId(0);
/// The coordinator table.
const STATES: PartitionId = PartitionId(1);

type Context<'a> = Cx<'a, ScalarDb>;

impl Machine<ScalarDb> for Server {
    fn new(setup: Setup<ScalarDb>, recovered: Vec<Stored>, _: &mut Context<'_>) -> Self {
        let Setup { config, engine, .. } = setup;
        let mut server = Self {
            config,
            data: Store::new(engine),
            prepared: OrdMap::new(),
            fresh: OrdMap::new(),
            held: OrdMap::new(),
            records: 0,
            checkpoint: None,
        };
        for record in recovered {
            server.apply(record);
        }
        server
    }

    fn step(&mut self, input: Input<ScalarDb>, cx: &mut Context<'_>) {
        match input {
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Durable(ticket) => self.on_durable(ticket, cx),
            // A source has no replicas to move.
            Input::Admin(_) => {}
            Input::Timer(_)
            | Input::Begin(_)
            | Input::Read { .. }
            | Input::Decide { .. }
            | Input::Resolve { .. } => unreachable!("only a middleware has that"),
        }
    }

    fn flush(&mut self, _: &mut Context<'_>) {}

    fn assert_invariants(&self) {
        for (ticket, answers) in &self.held {
            assert!(!answers.is_empty(), "nothing waits for {ticket:?}");
        }
    }

    /// Prepared records are not counted: a transaction that finds one ends it, however late.
    fn leaks(&self) -> Vec<Leak> {
        vec![("answers", self.held.values().map(Vec::len).sum())]
    }
}

impl Server {
    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        match msg {
            Msg::Read { request, keys, .. } => self.on_read(from, request, keys, cx),
            Msg::Prepare { request, txn, coordinator, since, images } => {
                self.on_prepare(from, request, Mark { txn, coordinator, since }, images, cx);
            }
            Msg::PutState { request, txn, state } => {
                self.on_put_state(from, request, txn, state, cx);
            }
            Msg::GetState { request, txn } => {
                let state = self.state(txn);
                self.answer(from, Msg::StateIs { request, state }, [Row::State(txn)], cx);
            }
            Msg::Commit { request, txn, at, keys } => {
                self.change(Stored::Committed { txn, at, keys: keys.clone() }, cx);
                self.answer(from, Msg::Ended { request }, keys.into_iter().map(Row::Record), cx);
            }
            Msg::Rollback { request, txn, keys } => {
                self.change(Stored::RolledBack { txn, keys: keys.clone() }, cx);
                self.answer(from, Msg::Ended { request }, keys.into_iter().map(Row::Record), cx);
            }
            Msg::Records { .. }
            | Msg::Prepared { .. }
            | Msg::StateIs { .. }
            | Msg::Ended { .. } => unreachable!("only a middleware is told that"),
        }
    }

    fn on_read(&mut self, from: NodeId, request: u64, keys: Vec<Key>, cx: &mut Context<'_>) {
        let records = keys.iter().map(|key| Record {
            key: key.clone(),
            committed: self.data.read(RECORDS, key),
            prepared: self.prepared.get(key).map(|(mark, _)| *mark),
        });
        let records = records.collect();
        self.answer(from, Msg::Records { request, records }, keys.into_iter().map(Row::Record), cx);
    }

    fn on_prepare(
        &mut self,
        from: NodeId,
        request: u64,
        mark: Mark,
        images: Vec<Image>,
        cx: &mut Context<'_>,
    ) {
        let keys: Vec<Key> = images.iter().map(|image| image.key.clone()).collect();
        let is_done = images.iter().all(|image| self.admits(mark.txn, image));
        if is_done {
            let images = images.into_iter().filter(|image| !self.prepared.contains_key(&image.key));
            let images: Vec<_> = images.map(|image| (image.key, image.value)).collect();
            if !images.is_empty() {
                self.change(Stored::Prepared { mark, images }, cx);
            }
        } else {
            cx.note(Note::PrepareRefused);
        }
        let answer = Msg::Prepared { request, is_done };
        self.answer(from, answer, keys.into_iter().map(Row::Record), cx);
    }

    /// True if the record is unchanged since it was read, or the transaction has prepared it
    /// already.
    fn admits(&self, txn: TxnId, image: &Image) -> bool {
        match self.prepared.get(&image.key) {
            Some((mark, _)) => mark.txn == txn,
            None if self.config.mutations.blind_prepare => true,
            None => self.data.read(RECORDS, &image.key).version == image.read,
        }
    }

    fn on_put_state(
        &mut self,
        from: NodeId,
        request: u64,
        txn: TxnId,
        state: State,
        cx: &mut Context<'_>,
    ) {
        if self.state(txn).is_none() {
            self.change(Stored::State { txn, state }, cx);
        }
        let state = self.state(txn);
        if self.config.mutations.early_state {
            cx.send(from, Msg::StateIs { request, state });
            return;
        }
        self.answer(from, Msg::StateIs { request, state }, [Row::State(txn)], cx);
    }

    fn state(&self, txn: TxnId) -> Option<State> {
        let read = self.data.read(STATES, &state_key(txn));
        let value = read.value?;
        Some(if *value.0 == *COMMITTED {
            State::Committed(read.version.timestamp)
        } else {
            State::Aborted
        })
    }

    /// Sends an answer as soon as the rows that it reports are durable.
    fn answer(
        &mut self,
        to: NodeId,
        msg: Msg,
        rows: impl IntoIterator<Item = Row>,
        cx: &mut Context<'_>,
    ) {
        match rows.into_iter().filter_map(|row| self.fresh.get(&row).copied()).max() {
            Some(ticket) => self.held.entry(ticket).or_default().push((to, msg)),
            None => cx.send(to, msg),
        }
    }

    fn change(&mut self, record: Stored, cx: &mut Context<'_>) {
        let rows: Vec<Row> = match &record {
            Stored::Prepared { images, .. } => {
                images.iter().map(|(key, _)| Row::Record(key.clone())).collect()
            }
            Stored::Committed { txn, keys, .. } | Stored::RolledBack { txn, keys } => {
                let mine = keys.iter().filter(|key| self.is_prepared_by(key, *txn));
                mine.cloned().map(Row::Record).collect()
            }
            Stored::State { txn, .. } => vec![Row::State(*txn)],
        };
        if rows.is_empty() {
            return;
        }
        self.apply(record.clone());
        let ticket = cx.persist(record);
        self.fresh.extend(rows.into_iter().map(|row| (row, ticket)));
        self.records += 1;
    }

    fn is_prepared_by(&self, key: &Key, txn: TxnId) -> bool {
        self.prepared.get(key).is_some_and(|(mark, _)| mark.txn == txn)
    }

    fn apply(&mut self, record: Stored) {
        match record {
            Stored::Prepared { mark, images } => {
                self.prepared.extend(images.into_iter().map(|(key, value)| (key, (mark, value))));
            }
            Stored::Committed { txn, at, keys } => {
                for key in keys {
                    if !self.is_prepared_by(&key, txn) {
                        continue;
                    }
                    if let Some((_, value)) = self.prepared.remove(&key) {
                        self.data.put(RECORDS, key, Version { timestamp: at, writer: txn }, value);
                    }
                }
                // No transaction reads old versions. A row that is inserted again gets a later
                // version than its deletion.
                self.data.collect_values_below(RECORDS, at);
            }
            Stored::RolledBack { txn, keys } => {
                for key in keys {
                    if self.is_prepared_by(&key, txn) {
                        self.prepared.remove(&key);
                    }
                }
            }
            Stored::State { txn, state } => {
                let (timestamp, word) = match state {
                    State::Committed(at) => (at, COMMITTED),
                    State::Aborted => (Timestamp::ZERO.next(), ABORTED),
                };
                let version = Version { timestamp, writer: txn };
                self.data.put(STATES, state_key(txn), version, Some(Value::from(word.to_vec())));
            }
        }
    }

    fn on_durable(&mut self, ticket: Ticket, cx: &mut Context<'_>) {
        self.fresh.retain(|_, changed| *changed > ticket);
        let later = self.held.split_off(&Ticket(ticket.0 + 1));
        for (to, msg) in std::mem::replace(&mut self.held, later).into_values().flatten() {
            cx.send(to, msg);
        }
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.data.thaw();
        }
        if self.records >= self.config.checkpoint_records && self.checkpoint.is_none() {
            let prepared = self.prepared.iter().map(|(key, (mark, value))| Stored::Prepared {
                mark: *mark,
                images: vec![(key.clone(), value.clone())],
            });
            let prepared = prepared.collect();
            self.records = 0;
            self.checkpoint = Some(cx.checkpoint(self.data.freeze(), prepared));
        }
    }
}

const COMMITTED: &[u8] = b"committed";
const ABORTED: &[u8] = b"aborted";

fn state_key(txn: TxnId) -> Key {
    Key::from(txn.to_string())
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.prepared.is_empty() {
            return f.write_str("nothing is prepared");
        }
        for (at, (key, (mark, _))) in self.prepared.iter().enumerate() {
            let separator = if at == 0 { "" } else { ", " };
            write!(f, "{separator}{key} is prepared by {}", mark.txn)?;
        }
        Ok(())
    }
}
