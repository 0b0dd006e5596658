//! The handshake of two processes, in both directions, before any frame.
//!
//! It contains `ORTHODRM`, the lowest and the highest wire version of the sender (two bytes each),
//! the length of the rest (two bytes), a `Hello` in protobuf, and a CRC-32C of everything before
//! it. Both ends check everything. The acceptor answers with a `Hello` too, which contains the
//! reason if it refuses.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::sync::Arc;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::wire::{self, Fixed};
use orthodrome_core::{Cluster, NodeId, Wire};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::shared_clock::SharedClock;

const MAGIC: &[u8; 8] = b"ORTHODRM";
/// The wire versions of this build.
pub const VERSIONS: (u16, u16) = (5, 5);
const HEAD: usize = 14;
/// Maximum length of a `Hello`, in bytes.
const HELLO_MAX: usize = 2048;
const REFUSAL_MAX: usize = 512;

/// The first message of both ends of a connection.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
struct Hello {
    /// The cluster of the sender.
    cluster: String,
    /// Its server machine.
    node: u32,
    /// Its gateway machine.
    gateway: u32,
    /// Name of its region.
    region: String,
    /// The version of the sender's placement, and
    map_epoch: u64,
    /// a digest of it.
    map_digest: Fixed,
    /// The protocol of the keyspace.
    protocol: String,
    /// The identity of the machine whose clock it uses, if all nodes share one; empty if not.
    machine: String,
    /// Its offset of the shared clock ([`SharedClock`]), in nanoseconds; as two's complement.
    clock_offset: Fixed,
    /// The reason why the sender refuses the connection; empty if it accepts.
    refusal: String,
    /// The number of the sender's process; 0 from an earlier version.
    instance: Fixed,
    /// True if the sender refuses because it is connected to another process with the same id.
    runs_elsewhere: bool,
    /// True if the sender understands requests for names; false from an earlier version.
    lists_names: bool,
    /// True if the sender understands [`Frame::Leaving`](super::frame::Frame::Leaving); false from an
    /// earlier version.
    knows_leaving: bool,
}

/// What the other end understands beyond messages and pings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// Requests for names.
    pub lists_names: bool,
    /// [`Frame::Leaving`](super::frame::Frame::Leaving).
    pub knows_leaving: bool,
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection broke.
    #[error("the connection broke in the handshake: {0}")]
    Io(#[from] io::Error),
    /// It took too long.
    #[error("the handshake took too long")]
    Timeout,
    /// The other end is not a node.
    #[error(
        "the other end is not an Orthodrome node ({0}); check the address and whether both ends use TLS"
    )]
    NotANode(&'static str),
    /// No version in common.
    #[error("the other end speaks wire versions {theirs:?}, this one {ours:?}; upgrade the older node", ours = VERSIONS)]
    Version {
        /// The other end's lowest and highest.
        theirs: (u16, u16),
    },
    /// The other end's introduction does not match.
    #[error("{field} of the other end is {theirs}, and here it is {ours}; {remedy}")]
    Mismatch {
        /// The field that differs.
        field: &'static str,
        /// The other end's value.
        theirs: String,
        /// The value here.
        ours: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A process of the cluster has another placement of partitions.
    #[error(
        "{field} of {node} is {theirs}, and here it is {ours}; give all nodes the same `map_epoch`, topology, nodes \
         and placement"
    )]
    OtherPlacement {
        /// The process.
        node: NodeId,
        /// The field that differs.
        field: &'static str,
        /// The other end's value.
        theirs: String,
        /// The value here.
        ours: String,
    },
    /// Another process with the same id is connected to the accepting end, and lives.
    #[error("another process runs as {node} and is connected to {to}; stop one of the two")]
    RunsElsewhere {
        /// The id of both processes.
        node: NodeId,
        /// The accepting end.
        to: NodeId,
    },
    /// The other end refused.
    #[error("the other end refuses: {0}")]
    Refused(String),
}

/// One process of the cluster, according to the configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Process {
    /// Its server machine; also the name of the process.
    pub node: NodeId,
    /// Its gateway machine.
    pub gateway: NodeId,
    /// Name of its region.
    pub region: String,
}

/// The introduction of a process, and its knowledge of the others.
#[derive(Clone, Debug)]
pub struct Introduction {
    /// The cluster's id.
    pub cluster: String,
    /// This process.
    pub me: Process,
    /// The number of this process, drawn when it starts; see [`draw_instance`].
    pub instance: u64,
    /// All processes but this one.
    pub others: OrdMap<NodeId, Process>,
    /// The epoch of the placement.
    pub map_epoch: u64,
    /// See [`map_digest`].
    pub map_digest: u64,
    /// The keyspace's protocol.
    pub protocol: String,
    /// The clock that this process shares with all others, if they run on one machine.
    pub shared_clock: Option<Arc<SharedClock>>,
}

/// A number for this process. A node has another one after each start, and so has a process that
/// runs on a copy of its data.
#[must_use]
pub fn draw_instance() -> u64 {
    // The standard library seeds each hasher at random. 0 is an earlier version's.
    RandomState::new().build_hasher().finish().max(1)
}

/// A digest of the placement: nodes with different placements must not communicate.
#[must_use]
pub fn map_digest(cluster: &Cluster) -> u64 {
    // The debug form of a placement contains every node, replica and range, and no addresses.
    let text = format!("{cluster:?}");
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl Introduction {
    fn hello(&self, refusal: &str) -> Hello {
        let mut refusal = refusal.to_owned();
        refusal.truncate(refusal.floor_char_boundary(REFUSAL_MAX));
        Hello {
            cluster: self.cluster.clone(),
            node: self.me.node.0,
            gateway: self.me.gateway.0,
            region: self.me.region.clone(),
            map_epoch: self.map_epoch,
            map_digest: Fixed(self.map_digest),
            protocol: self.protocol.clone(),
            machine: self.machine().to_owned(),
            clock_offset: Fixed(
                self.shared_clock.as_ref().map_or(0, |c| c.offset().cast_unsigned()),
            ),
            refusal,
            instance: Fixed(self.instance),
            runs_elsewhere: false,
            lists_names: true,
            knows_leaving: true,
        }
    }

    fn machine(&self) -> &str {
        self.shared_clock.as_ref().map_or("", |clock| clock.machine())
    }

    /// Two processes that share a clock learn each other's offsets.
    fn meet(&self, hello: &Hello) -> Result<(), HandshakeError> {
        let Some(clock) = &self.shared_clock else { return Ok(()) };
        let theirs = hello.clock_offset.0.cast_signed();
        if clock.meet(NodeId(hello.node), theirs) {
            return Ok(());
        }
        Err(HandshakeError::Mismatch {
            field: "clock offset",
            theirs: format!("{theirs} ns"),
            ours: format!("{} ns", clock.offset()),
            remedy: "the system clock was moved; correct it, then start the older node again",
        })
    }

    /// The process that sent `hello`, if it belongs to the cluster.
    fn check(&self, hello: &Hello) -> Result<&Process, HandshakeError> {
        let same = |field, theirs: &dyn ToString, ours: &dyn ToString, remedy| {
            let (theirs, ours) = (theirs.to_string(), ours.to_string());
            if theirs == ours {
                return Ok(());
            }
            Err(HandshakeError::Mismatch { field, theirs, ours, remedy })
        };
        let address = "one of the two has the wrong address";
        same("cluster", &hello.cluster, &self.cluster, address)?;
        let node = NodeId(hello.node);
        let Some(known) = self.others.get(&node) else {
            let ours = format!("{} among {:?}", self.me.node, self.others.keys());
            let field = "node id";
            let remedy = "give every node its own id, and all nodes one list of nodes";
            return Err(HandshakeError::Mismatch { field, theirs: node.to_string(), ours, remedy });
        };
        let lists = "give all nodes one list of nodes";
        same("gateway id", &NodeId(hello.gateway), &known.gateway, lists)?;
        same("region", &hello.region, &known.region, lists)?;
        let maps = [
            ("map epoch", hello.map_epoch.to_string(), self.map_epoch.to_string()),
            (
                "map digest",
                format!("{:016x}", hello.map_digest.0),
                format!("{:016x}", self.map_digest),
            ),
        ];
        if let Some((field, theirs, ours)) =
            maps.into_iter().find(|(_, theirs, ours)| theirs != ours)
        {
            return Err(HandshakeError::OtherPlacement { node, field, theirs, ours });
        }
        same("protocol", &hello.protocol, &self.protocol, "set one `protocol` on all nodes")?;
        // A process of another machine must not be taken for one that shares the clock.
        let apart = "if loopback addresses in `nodes` lead to other machines, set `shared_clock` to \
                     false on all nodes";
        same("machine", &hello.machine, &self.machine(), apart)?;
        Ok(known)
    }
}

/// The connecting end: introduces itself, and returns when `expected` has answered: what that
/// understands.
///
/// # Errors
/// See [`HandshakeError`].
pub async fn dial<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    mine: &Introduction,
    expected: NodeId,
) -> Result<Abilities, HandshakeError> {
    stream.write_all(&encode(&mine.hello(""))).await?;
    stream.flush().await?;
    let hello = read(stream).await?;
    if hello.runs_elsewhere && hello.cluster == mine.cluster && hello.node == expected.0 {
        return Err(HandshakeError::RunsElsewhere { node: mine.me.node, to: expected });
    }
    if !hello.refusal.is_empty() {
        let plain = hello.refusal.chars().filter(|c| !c.is_control()).collect();
        return Err(HandshakeError::Refused(plain));
    }
    let found = mine.check(&hello)?;
    if found.node == expected {
        let Hello { lists_names, knows_leaving, .. } = hello;
        return mine.meet(&hello).map(|()| Abilities { lists_names, knows_leaving });
    }
    Err(HandshakeError::Mismatch {
        field: "node id",
        theirs: found.node.to_string(),
        ours: expected.to_string(),
        remedy: "the list of nodes gives it the wrong address",
    })
}

/// The accepting end: returns the process that connected. `certified` checks that the certificate
/// belongs to that process. `admit` gets its id and its number, and decides last.
///
/// # Errors
/// See [`HandshakeError`]. The other end was informed of the reason.
pub async fn accept<S, A, F>(
    stream: &mut S,
    mine: &Introduction,
    certified: impl FnOnce(&Process) -> Result<(), String>,
    admit: impl FnOnce(NodeId, u64) -> F,
) -> Result<(Process, A), HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Result<A, HandshakeError>>,
{
    let caller = match read(stream).await {
        Ok(hello) => {
            let checked = mine.check(&hello);
            // The node stops if most others have another placement, so only they may say so.
            let claimed = match &checked {
                Ok(process) => Some(*process),
                Err(HandshakeError::OtherPlacement { node, .. }) => mine.others.get(node),
                Err(_) => None,
            };
            let certified = claimed.map_or(Ok(()), |process| {
                certified(process).map_err(|theirs| HandshakeError::Mismatch {
                    field: "certificate",
                    theirs,
                    ours: process.node.to_string(),
                    remedy: "give each node the certificate that was made for it",
                })
            });
            match certified.and(checked) {
                Ok(process) => match admit(process.node, hello.instance.0).await {
                    // Before the answer, which tells the higher of both offsets.
                    Ok(admitted) => mine.meet(&hello).map(|()| (process.clone(), admitted)),
                    Err(error) => Err(error),
                },
                Err(error) => Err(error),
            }
        }
        Err(error @ HandshakeError::Version { .. }) => Err(error),
        // The other end would not understand an answer.
        Err(error) => return Err(error),
    };
    let refusal = caller.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let mut hello = mine.hello(&refusal);
    hello.runs_elsewhere = matches!(caller, Err(HandshakeError::RunsElsewhere { .. }));
    stream.write_all(&encode(&hello)).await?;
    stream.flush().await?;
    caller
}

fn encode(hello: &Hello) -> BytesMut {
    let mut out = BytesMut::new();
    out.put_slice(MAGIC);
    out.put_u16_le(VERSIONS.0);
    out.put_u16_le(VERSIONS.1);
    out.put_u16_le(hello.size() as u16);
    hello.put(&mut out);
    let crc = crc32c::crc32c(&out);
    out.put_u32_le(crc);
    out
}

/// The length of the part after the head.
fn parse_head(head: &[u8; HEAD]) -> Result<usize, HandshakeError> {
    let mut fields = &head[..];
    if !fields.starts_with(MAGIC) {
        return Err(HandshakeError::NotANode("wrong first bytes"));
    }
    fields.advance(MAGIC.len());
    let theirs = (fields.get_u16_le(), fields.get_u16_le());
    // This build has one version; one with several would choose the highest common one.
    if theirs.0 > VERSIONS.1 || theirs.1 < VERSIONS.0 {
        return Err(HandshakeError::Version { theirs });
    }
    let length = usize::from(fields.get_u16_le());
    if length > HELLO_MAX {
        return Err(HandshakeError::NotANode("an introduction over the limit"));
    }
    Ok(length)
}

fn parse_body(head: &[u8; HEAD], body: &[u8]) -> Result<Hello, HandshakeError> {
    let bad = HandshakeError::NotANode;
    let at = body.len().checked_sub(4).ok_or_else(|| bad("an introduction cut off"))?;
    let (hello, mut crc) = body.split_at(at);
    if crc.get_u32_le() != crc32c::crc32c_append(crc32c::crc32c(head), hello) {
        return Err(bad("wrong checksum"));
    }
    let hello = Bytes::copy_from_slice(hello);
    wire::decode(&hello).map_err(|_| bad("an introduction of another form"))
}

async fn read<S: AsyncRead + Unpin>(stream: &mut S) -> Result<Hello, HandshakeError> {
    let mut head = [0; HEAD];
    stream.read_exact(&mut head).await?;
    let mut body = vec![0; parse_head(&head)? + 4];
    stream.read_exact(&mut body).await?;
    parse_body(&head, &body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn process(node: u32) -> Process {
        Process { node: NodeId(node), gateway: NodeId(1000 + node), region: "A".into() }
    }

    fn introduction(node: u32) -> Introduction {
        Introduction {
            cluster: "test".into(),
            me: process(node),
            instance: draw_instance(),
            others: (1..=3).filter(|n| *n != node).map(|n| (NodeId(n), process(n))).collect(),
            map_epoch: 1,
            map_digest: 77,
            protocol: "toy".into(),
            shared_clock: None,
        }
    }

    fn on_machine(node: u32, machine: &str, offset: i64) -> Introduction {
        let others = (1..=3).filter(|n| *n != node).map(NodeId);
        let clock = SharedClock::new(machine.into(), offset, 1_000, others);
        Introduction { shared_clock: Some(Arc::new(clock)), ..introduction(node) }
    }

    #[tokio::test]
    async fn processes_of_one_machine_keep_the_higher_offset_of_their_clock() {
        for (a, b) in [(-500, 400), (400, -500)] {
            let (a, b) = (on_machine(1, "m", a), on_machine(2, "m", b));
            let clocks = [a.shared_clock.clone().unwrap(), b.shared_clock.clone().unwrap()];
            let (dialed, accepted) = meet(a, b, 2).await;
            dialed.unwrap();
            accepted.unwrap();
            assert_eq!(clocks.each_ref().map(|clock| clock.offset()), [400, 400]);
            // The dialer knows that the acceptor has heard of both.
            assert_eq!(clocks[0].offsets().least, 400);
        }
    }

    #[tokio::test]
    async fn a_process_of_another_machine_is_refused_where_one_clock_is_shared() {
        for stranger in [on_machine(1, "elsewhere", 0), introduction(1), on_machine(1, "m", 5_000)]
        {
            let acceptor = on_machine(2, "m", 0);
            let clock = acceptor.shared_clock.clone().unwrap();
            let (dialed, accepted) = meet(stranger.clone(), acceptor.clone(), 2).await;
            let why = accepted.unwrap_err().to_string();
            assert!(why.contains("machine of the other") || why.contains("clock offset"), "{why}");
            assert!(matches!(dialed.unwrap_err(), HandshakeError::Refused(_)));
            // And the other way round.
            let (_, accepted) = meet(acceptor, stranger, 1).await;
            assert!(accepted.is_err());
            assert!(!clock.offsets().is_complete && clock.offset() == 0);
        }
    }

    type Ends = (Result<(), HandshakeError>, Result<Process, HandshakeError>);

    async fn meet(a: Introduction, b: Introduction, expected: u32) -> Ends {
        let (mut dialer, mut acceptor) = tokio::io::duplex(4096);
        let all = |_: NodeId, _: u64| async { Ok(()) };
        let accepted = accept(&mut acceptor, &b, |_| Ok(()), all);
        let (dialed, accepted) = tokio::join!(dial(&mut dialer, &a, NodeId(expected)), accepted);
        (dialed.map(drop), accepted.map(|(process, ())| process))
    }

    #[tokio::test]
    async fn two_nodes_of_one_cluster_meet() {
        let (dialed, accepted) = meet(introduction(1), introduction(2), 2).await;
        dialed.unwrap();
        assert_eq!(accepted.unwrap(), process(1));
    }

    #[tokio::test]
    async fn strangers_are_told_what_differs() {
        type Change = fn(&mut Introduction);
        let cases: [(&str, Change); 6] = [
            ("cluster", |mine| mine.cluster = "other".into()),
            ("node id", |mine| mine.me = process(9)),
            ("gateway id", |mine| mine.me.gateway = NodeId(5)),
            ("region", |mine| mine.me.region = "B".into()),
            ("map digest", |mine| mine.map_digest = 78),
            ("protocol", |mine| mine.protocol = "other".into()),
        ];
        for (field, change) in cases {
            let mut stranger = introduction(1);
            change(&mut stranger);
            let (dialed, accepted) = meet(stranger, introduction(2), 2).await;
            let (dialed, accepted) = (dialed.unwrap_err(), accepted.unwrap_err().to_string());
            assert!(accepted.contains(field), "{accepted}");
            assert!(
                matches!(&dialed, HandshakeError::Refused(why) if why.contains(field)),
                "{dialed}"
            );
        }
        // Its own id, and the right node at the wrong address.
        let (dialed, _) = meet(introduction(2), introduction(2), 2).await;
        assert!(dialed.unwrap_err().to_string().contains("node id"));
        let (dialed, _) = meet(introduction(1), introduction(2), 3).await;
        assert!(dialed.unwrap_err().to_string().contains("wrong address"));
    }

    #[tokio::test]
    async fn an_older_or_newer_node_is_told_the_versions() {
        let (mut dialer, mut acceptor) = tokio::io::duplex(4096);
        let mut bytes = encode(&introduction(1).hello(""));
        bytes[8..12].copy_from_slice(&[9, 0, 10, 0]);
        dialer.write_all(&bytes).await.unwrap();
        let all = |_: NodeId, _: u64| async { Ok(()) };
        let error = accept(&mut acceptor, &introduction(2), |_| Ok(()), all).await.unwrap_err();
        assert!(error.to_string().contains("(9, 10)"), "{error}");
        let answer = read(&mut dialer).await.unwrap();
        assert!(answer.refusal.contains("(9, 10)"), "{}", answer.refusal);
    }

    #[tokio::test]
    async fn a_cut_or_damaged_introduction_is_refused() {
        let whole = encode(&introduction(1).hello(""));
        for cut in 0..whole.len() {
            let mut stream = &whole[..cut];
            assert!(matches!(read(&mut stream).await, Err(HandshakeError::Io(_))), "cut at {cut}");
        }
        for bit in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let mut stream = &bytes[..];
            let result = read(&mut stream).await;
            let is_version = (8 * 8..12 * 8).contains(&bit);
            assert!(result.is_err(), "bit {bit} was read as {result:?} (version: {is_version})");
        }
    }

    proptest! {
        #![proptest_config(crate::fuzz_config())]

        #[test]
        fn arbitrary_bytes_never_panic(
            head in any::<[u8; HEAD]>(),
            body in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = parse_head(&head);
            let _ = parse_body(&head, &body);
            // With a correct checksum, the fields are parsed.
            let mut sealed = body.clone();
            let crc = crc32c::crc32c_append(crc32c::crc32c(&head), &body);
            sealed.put_u32_le(crc);
            if let Ok(hello) = parse_body(&head, &sealed) {
                let _ = introduction(1).check(&hello);
            }
        }
    }
}
