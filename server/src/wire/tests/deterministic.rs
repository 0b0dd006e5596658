//! The messages and records of the deterministic protocols: there and back, their sizes, and damage.

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::txn::Reads;
use orthodrome_protocols::deterministic::checks::Span;
use orthodrome_protocols::deterministic::merge::Place;
use orthodrome_protocols::deterministic::{
    Chunk, Command, Deterministic, Due, Ended, Home, Image, Log, Msg, Name, Part, Record,
    Sequenced, StreamImage, Turn,
};
use orthodrome_protocols::functor::{Body, Functor};

use super::*;

type Protocol = Deterministic;

const MSGS: u64 = 16;

fn outcome(draw: &mut Draw) -> Outcome {
    match draw.below(2) {
        0 => Outcome::Committed(draw.timestamp()),
        _ => Outcome::Aborted(draw.reason()),
    }
}

fn functor(draw: &mut Draw) -> Arc<Functor> {
    let set = |draw: &mut Draw| -> Vec<Key> {
        draw.keys().into_iter().collect::<BTreeSet<_>>().into_iter().collect()
    };
    let body = match draw.below(2) {
        0 => Body::Ops(vec![
            Op::Get(draw.key()),
            Op::Add(draw.key(), 5),
            Op::Compare(draw.key(), draw.value()),
        ]),
        _ => Body::Validate { expected: draw.versions(), writes: draw.writes() },
    };
    Arc::new(Functor {
        txn: draw.txn_id(),
        reads: set(draw),
        writes: set(draw),
        body,
        acknowledged_below: draw.below(100_000),
    })
}

fn entry(draw: &mut Draw) -> Arc<Sequenced> {
    let mut homes: BTreeSet<PartitionId> = draw.partitions().into_iter().collect();
    homes.insert(draw.partition());
    let homes = homes.into_iter().collect();
    Arc::new(Sequenced {
        functor: functor(draw),
        homes,
        due: draw.timestamp(),
        moved: draw.many(3, moved),
        target: draw.option(Draw::partition),
        origin: RegionId(draw.below(99) as u16),
        is_piece: draw.below(2) == 1,
    })
}

fn moved(draw: &mut Draw) -> (Key, Home) {
    let (counter, stream) = (draw.below(1 << 40), draw.partition());
    (draw.key(), Home { counter, stream, since: draw.timestamp() })
}

fn name(draw: &mut Draw) -> Name {
    Name { txn: draw.txn_id(), map: draw.below(1 << 60) }
}

fn reads(draw: &mut Draw) -> Reads {
    draw.reads().into_iter().collect()
}

fn msg(draw: &mut Draw, kind: u64) -> Msg {
    let txn = draw.txn_id();
    let round = 1 + draw.below(9) as u32;
    match kind {
        0 => Msg::Submit { functor: functor(draw) },
        1 => Msg::Answer { txn, outcome: outcome(draw), reads: reads(draw) },
        2 => Msg::Look { txn, round, keys: draw.keys() },
        3 => Msg::Found { txn, round, reads: reads(draw) },
        4 => Msg::Sequence { stream: draw.partition(), entry: entry(draw) },
        5 => Msg::NotLeader {
            partition: draw.partition(),
            leader: draw.option(Draw::node),
            txn: Some(txn),
        },
        6 => Msg::NotLeader { partition: draw.partition(), leader: None, txn: None },
        7 => Msg::RemoteReads { parts: draw.many(4, part) },
        8 => Msg::WantReads { turns: draw.many(4, turn) },
        9 => Msg::ReadsGone { turns: draw.many(4, turn) },
        10 => {
            let through = draw.many(4, |draw| (draw.partition(), Index(draw.below(1 << 30))));
            Msg::Covered { through: through.into_iter().collect() }
        }
        11 => {
            let cursor = draw.option(|draw| draw.below(1 << 20) as usize);
            Msg::WantState { number: draw.below(999), past: turn(draw), cursor }
        }
        12 => {
            let next = draw.option(|draw| draw.below(1 << 20) as usize);
            let chunk = Chunk { image: None, keys: Vec::new() };
            Msg::StatePiece { number: draw.below(999), chunk, next }
        }
        13 => Msg::TooOld { txn, outcome: draw.option(outcome) },
        14 => Msg::Digests { digests: draw.many(4, span) },
        _ => {
            let (term, matched, received) = (Term(3), Index(draw.below(1 << 30)), Index(7 << 20));
            let beat = Beat { round: 1 << 40, sent_at: orthodrome_core::Time(1 << 50) };
            let message = replication::Message::AppendReply { term, matched, received, beat };
            Msg::Replication { partition: draw.partition(), message }
        }
    }
}

fn span(draw: &mut Draw) -> (Span, u64) {
    let first = 1 + draw.below(1 << 30);
    let (first, last) = (Index(first), Index(first + 63));
    (Span { stream: draw.partition(), first, last }, draw.below(u64::MAX))
}

fn turn(draw: &mut Draw) -> Turn {
    Turn { stream: draw.partition(), index: Index(draw.below(1 << 30)), name: name(draw) }
}

fn part(draw: &mut Draw) -> (Turn, Arc<Part>) {
    (turn(draw), Arc::new(Part { reads: reads(draw), newest: draw.timestamp() }))
}

fn place(draw: &mut Draw) -> (PartitionId, Place) {
    let index = Index(draw.below(1 << 40));
    let (offset, stamp) = (draw.below(99) as u32, draw.timestamp());
    (draw.partition(), Place { index, offset, stamp, is_late: draw.below(2) == 1 })
}

fn image(draw: &mut Draw) -> Image {
    let streams = draw.many(3, |draw| {
        let acknowledged = draw.many(3, |draw| (draw.txn_id().client, draw.below(999)));
        let forgotten = draw.many(3, |draw| (draw.txn_id().client, draw.below(999)));
        let moves = draw.many(3, |draw| (draw.key(), draw.below(99)));
        let image = StreamImage {
            applied: Index(draw.below(1 << 40)),
            stamp: draw.timestamp(),
            seen: draw.many(4, name).into_iter().collect(),
            acknowledged: acknowledged.into_iter().collect(),
            forgotten: forgotten.into_iter().collect(),
            moves: moves.into_iter().collect(),
        };
        (draw.partition(), image)
    });
    let pending = draw.many(3, |draw| {
        let (stream, place) = place(draw);
        (stream, place, entry(draw))
    });
    let ended = draw.many(3, |draw| {
        let (outcome, reads) = (outcome(draw), draw.option(reads));
        (draw.txn_id(), Ended { outcome, reads, stamp: draw.timestamp() })
    });
    Image {
        number: draw.below(99),
        piece: draw.below(9) as u32,
        pieces: draw.below(9) as u32,
        streams: streams.into_iter().collect(),
        pending,
        ended: ended.into_iter().collect::<BTreeMap<_, _>>(),
        moved: draw.many(3, moved).into_iter().collect(),
        ran: draw.many(3, Draw::txn_id).into_iter().collect(),
        shares: draw.below(4) as u32,
        due: draw.many(3, |draw| Due {
            entry: entry(draw),
            stamp: draw.timestamp(),
            places: draw.many(3, place),
        }),
        kept: draw.many(3, part).into_iter().collect(),
    }
}

fn everything(draw: &mut Draw) -> (Vec<Msg>, Vec<Record>) {
    let msgs = (0..MSGS).map(|kind| msg(draw, kind)).collect();
    let batch = Command::Batch { stamp: draw.timestamp(), entries: draw.many(4, entry) };
    let clients = draw.many(9, |draw| (draw.txn_id().client, draw.below(9_999)));
    let mut records: Vec<Record> =
        [batch, Command::Acknowledge(clients.clone()), Command::Forget(clients)]
            .into_iter()
            .map(|command| {
                let payload = Payload::Command(Arc::new(command));
                let (index, entry) = (Index(1), Entry { term: Term(1), payload });
                Record::Replication(PartitionId(3), replication::Record::Entry { index, entry })
            })
            .collect();
    records.push(Record::Image(Arc::new(image(draw))));
    (msgs, records)
}

fn msg_bytes(msg: &Msg) -> Bytes {
    let mut out = BytesMut::new();
    Protocol::encode_msg(msg, &mut out);
    out.freeze()
}

fn record_bytes(record: &Record) -> Bytes {
    let mut out = BytesMut::new();
    Protocol::encode_record(record, &mut out);
    out.freeze()
}

#[test]
fn every_message_and_record_comes_back_as_it_was() {
    for seed in 0..300 {
        let mut draw = draw(seed);
        let (msgs, records) = everything(&mut draw);
        for msg in msgs {
            assert_eq!(Protocol::decode_msg(msg_bytes(&msg)).as_ref(), Ok(&msg));
        }
        for record in records {
            assert_eq!(Protocol::decode_record(record_bytes(&record)).as_ref(), Ok(&record));
        }
        let image = draw.option(|draw| Arc::new(image(draw)));
        let chunk = Chunk { image, keys: Vec::new() };
        assert_eq!(Log::decode_chunk(Log::encode_chunk(&chunk)).as_ref(), Ok(&chunk));
    }
}

#[test]
fn the_size_that_models_count_is_about_that_of_the_bytes() {
    for seed in 0..500 {
        let mut draw = draw(seed);
        draw.1 = false;
        for msg in everything(&mut draw).0 {
            let (real, claimed) = (msg_bytes(&msg).len(), msg.wire_size());
            let off = claimed.abs_diff(real);
            assert!(off <= (real / 10).max(24), "{real} bytes, {claimed} claimed: {msg:?}");
        }
    }
}

#[test]
fn cut_or_damaged_bytes_never_panic_nor_pass_for_the_whole() {
    for seed in 0..60 {
        let mut draw = draw(seed);
        let (msgs, records) = everything(&mut draw);
        for msg in msgs {
            let bytes = msg_bytes(&msg);
            for at in 0..bytes.len() {
                assert_ne!(Protocol::decode_msg(bytes.slice(..at)).as_ref(), Ok(&msg));
                let mut damaged = bytes.to_vec();
                damaged[at] = draw.below(256) as u8;
                let _ = Protocol::decode_msg(damaged.into());
            }
        }
        for record in records {
            let bytes = record_bytes(&record);
            for at in 0..bytes.len() {
                assert_ne!(Protocol::decode_record(bytes.slice(..at)).as_ref(), Ok(&record));
                let mut damaged = bytes.to_vec();
                damaged[at] = draw.below(256) as u8;
                let _ = Protocol::decode_record(damaged.into());
            }
        }
    }
}

#[test]
fn homes_are_in_order_each_once() {
    let entry = |homes: &[u32]| {
        let homes = homes.iter().copied().map(PartitionId).collect();
        Arc::new(Sequenced::new(functor(&mut draw(1)), homes, Vec::new(), RegionId(0)))
    };
    for homes in [&[][..], &[2, 1], &[1, 1]] {
        let msg = Msg::Sequence { stream: PartitionId(1), entry: entry(homes) };
        let error = Protocol::decode_msg(msg_bytes(&msg)).unwrap_err().to_string();
        assert!(error.contains("ascending"), "{error}");
    }
}
