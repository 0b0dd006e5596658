//! The trace of a run and its hash.

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::machine::{Input, Protocol};
use orthodrome_core::time::Time;
use orthodrome_core::trace::{Event as TraceEvent, Line};
use orthodrome_core::txn::{Key, Read, Reads};

use super::Environment;

impl<P: Protocol> Environment<P> {
    pub(super) fn log_input(&mut self, node: u32, input: &Input<P>) {
        match input {
            Input::Begin(txn) => {
                self.log(node, TraceEvent::Begin, None, None, Some(txn.id), "-", || {
                    format!("{txn:?}")
                });
            }
            Input::Read { txn, keys } => {
                self.log(node, TraceEvent::Read, None, None, Some(*txn), "-", || {
                    format!("{keys:?}")
                });
            }
            Input::Decide { txn, decision } => {
                self.log(node, TraceEvent::Decide, None, None, Some(*txn), "-", || {
                    format!("{decision:?}")
                });
            }
            Input::Resolve { txn, decision, .. } => {
                self.log(node, TraceEvent::Resolve, None, None, Some(txn.id), "-", || {
                    format!("{decision:?}")
                });
            }
            Input::Durable(ticket) => {
                self.log(node, TraceEvent::Durable, None, None, None, "-", || ticket.to_string());
            }
            Input::Admin(order) => {
                self.log(node, TraceEvent::Fault, None, None, None, "admin", || {
                    format!("{order:?}")
                });
            }
            // These are logged where they are created, with the details known there.
            Input::Message { .. } | Input::Timer(_) => {}
        }
    }

    /// Adds an event to the running hash and, if one is kept, to the trace.
    #[expect(clippy::too_many_arguments, reason = "the fields of a trace line, in their order")]
    pub(crate) fn log(
        &mut self,
        node: u32,
        event: TraceEvent,
        peer: Option<NodeId>,
        sent: Option<Time>,
        txn: Option<TxnId>,
        kind: &str,
        detail: impl FnOnce() -> String,
    ) {
        self.hash.add(self.now.0);
        self.hash.add((u64::from(node) << 32) | (event as u64));
        if let Some(peer) = peer {
            self.hash.add((u64::from(peer.0) << 32) | 1);
        }
        if let Some(txn) = txn {
            self.hash.add(txn.client.0.rotate_left(40) ^ txn.counter.rotate_left(16));
            self.hash.add(u64::from(txn.attempt));
        }
        self.hash.add_text(kind);
        if let Some(sink) = &mut self.trace {
            let node = self.ids.get(node as usize).copied().unwrap_or_default();
            let (at, kind, detail) = (self.now, kind.to_owned(), detail());
            sink(&Line { at, node, event, peer, sent, txn, kind, detail });
        }
    }
}

/// The beginning of a long text.
pub(super) fn shortened(mut text: String) -> String {
    let end = text.char_indices().map(|(at, _)| at).take_while(|at| *at <= 160).last();
    text.truncate(end.unwrap_or(0));
    text
}

/// The form is `key=value(version)`, with `-` for an absent key.
pub(super) fn describe(reads: &Reads) -> String {
    let one = |(key, read): (&Key, &Read)| {
        let value = read.value.as_ref().map_or_else(|| "-".into(), ToString::to_string);
        format!("{key}={value}({})", read.version)
    };
    reads.iter().map(one).collect::<Vec<_>>().join(" ")
}
