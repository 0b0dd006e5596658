//! The protocols that servers can run, by name.

use anyhow::bail;
use orthodrome_core::machine::Protocol as _;
use orthodrome_eval::checker::Model;
use orthodrome_protocols::carousel::CarouselBasic;
use orthodrome_protocols::registry;
use orthodrome_protocols::tapir::Tapir;
use orthodrome_server::wire::WireProtocol;

use crate::common::model_of;

/// What is run where nobody says otherwise.
pub const DEFAULT: &str = "carousel-basic";

/// Their names.
const NAMES: &[&str] = &[CarouselBasic::NAME, Tapir::NAME];

/// Something to do with a protocol that is known only by name.
pub trait Visitor {
    /// What comes of it.
    type Out;
    /// Does it.
    fn visit<P: WireProtocol>(self) -> Self::Out;
}

/// Does something with the protocol called `name`.
///
/// # Errors
/// There is no such protocol, or servers cannot run it.
pub fn with<V: Visitor>(name: &str, visitor: V) -> anyhow::Result<V::Out> {
    if name == CarouselBasic::NAME {
        return Ok(visitor.visit::<CarouselBasic>());
    }
    if name == Tapir::NAME {
        return Ok(visitor.visit::<Tapir>());
    }
    let known = NAMES.join(", ");
    if registry::find(name).is_ok() {
        bail!("protocol {name:?} runs in the simulator only; servers run: {known}");
    }
    bail!("there is no protocol {name:?}; servers run: {known}")
}

/// What histories of the protocol called `name` are held to.
///
/// # Errors
/// There is no such protocol.
pub fn model(name: &str) -> anyhow::Result<Model> {
    Ok(model_of(registry::find(name)?.guarantee))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Name;

    impl Visitor for Name {
        type Out = &'static str;
        fn visit<P: WireProtocol>(self) -> &'static str {
            P::NAME
        }
    }

    #[test]
    fn every_name_leads_to_its_protocol() {
        assert!(NAMES.contains(&DEFAULT));
        for name in NAMES {
            assert_eq!(with(name, Name).unwrap(), *name);
            assert!(model(name).is_ok());
        }
        let error = with("carousal", Name).unwrap_err().to_string();
        assert!(error.contains("carousal") && error.contains(DEFAULT), "{error}");
    }
}
