//! Messages between coordinators and participants, for protocols whose participants vote without a
//! request (Carousel §4.1). A protocol maps them to its own messages, with its own names and field
//! numbers.

use orthodrome_core::id::{PartitionId, TxnId};

/// A participant's leader → a coordinator's leader. `V` is a vote.
#[derive(Debug)]
pub enum ToCoordinator<V> {
    /// The participant's vote (Carousel §4.1.2).
    Vote { txn: TxnId, coordinator: PartitionId, partition: PartitionId, vote: V },
    /// The participant prepared this transaction, and so voted, long ago. It asks for the decision.
    QueryDecision { txn: TxnId, coordinator: PartitionId, partition: PartitionId, vote: V },
    /// The decision is in the participant's log.
    Ack { txn: TxnId, coordinator: PartitionId, partition: PartitionId },
    /// The participant asks which of these outcomes it may forget (R6).
    MayForget { coordinator: PartitionId, partition: PartitionId, txns: Vec<TxnId> },
}

/// A coordinator's leader → a participant's leader, besides the decision. `A` is a participant.
#[derive(Debug)]
pub enum ToParticipant<A> {
    /// The coordinator asks for the participant's vote.
    QueryPrepare { txn: TxnId, participant: A, coordinator: PartitionId },
    /// The coordinator's group will not ask about these outcomes again (R6).
    Forget { partition: PartitionId, coordinator: PartitionId, txns: Vec<TxnId> },
}
