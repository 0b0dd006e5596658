//! Authentication and authorization: tokens, client certificates, and roles.

use std::fmt;
use std::sync::Arc;

use orthodrome_core::ordered::OrdMap;

use subtle::{Choice, ConstantTimeEq};
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use super::refuse;

/// The keyspace of requests that name none.
pub const DEFAULT_KEYSPACE: &str = "default";

const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=256;

/// What a principal may do in a keyspace; each role includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Role {
    /// Read, and describe the cluster.
    Read,
    /// Also write.
    Write,
    /// Also give an operator's orders.
    Admin,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Admin => "admin",
        })
    }
}

/// A user of the service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Principal {
    /// Its name in logs. Not secret.
    pub name: String,
    /// Its role in each keyspace it may use.
    pub roles: OrdMap<String, Role>,
    /// Maximum number of attempts of high-priority transactions that it may begin a second at this
    /// gateway; further ones run with low priority. None: unlimited.
    pub high_priority_per_second: Option<u32>,
}

impl Principal {
    /// A principal with `role` in the default keyspace.
    #[must_use]
    pub fn new(name: &str, role: Role) -> Self {
        let roles = [(DEFAULT_KEYSPACE.into(), role)].into();
        Self { name: name.into(), roles, high_priority_per_second: None }
    }

    pub(super) fn require(&self, keyspace: &str, wanted: Role) -> Result<(), Status> {
        match self.roles.get(keyspace) {
            Some(&role) if role >= wanted => Ok(()),
            Some(role) => Err(refuse(Status::permission_denied(format!(
                "{:?} has role {role} in keyspace {keyspace:?}; the request needs {wanted}",
                self.name
            )))),
            None => Err(refuse(Status::permission_denied(format!(
                "{:?} has no role in keyspace {keyspace:?}",
                self.name
            )))),
        }
    }
}

/// The proof of a principal's identity. Its debug form shows no secret.
#[derive(Clone, PartialEq, Eq)]
pub enum Credential {
    /// The SHA-256 of a bearer token. The token itself is not stored.
    Token([u8; 32]),
    /// A client certificate in DER. It is accepted only if its chain ends at the configured
    /// authority, which the TLS handshake checks.
    Certificate(Vec<u8>),
}

impl Credential {
    /// A bearer token: 16 to 256 printable ASCII characters without spaces.
    ///
    /// # Errors
    /// The required form; the message does not contain the token.
    pub fn token(token: &str) -> Result<Self, &'static str> {
        if TOKEN_BYTES.contains(&token.len()) && token.bytes().all(|b| b.is_ascii_graphic()) {
            Ok(Self::Token(sha256(token.as_bytes())))
        } else {
            Err("a token must be 16 to 256 printable ASCII characters without spaces")
        }
    }

    /// A bearer token, given by its SHA-256 in hexadecimal.
    ///
    /// # Errors
    /// The mistake in the digits.
    pub fn token_sha256(digits: &str) -> Result<Self, &'static str> {
        let wrong = "the SHA-256 of a token must be 64 hexadecimal digits";
        let mut digest = [0; 32];
        if digits.len() != 2 * digest.len() || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(wrong);
        }
        for (byte, pair) in digest.iter_mut().zip(digits.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| wrong)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong)?;
        }
        Ok(Self::Token(digest))
    }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let mut array = [0; 32];
    for (to, from) in array.iter_mut().zip(digest.as_ref()) {
        *to = *from;
    }
    array
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token(_) => f.write_str("Token(…)"),
            Self::Certificate(der) => write!(f, "Certificate({} bytes)", der.len()),
        }
    }
}

/// A list of principals is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// The list is empty, so no client could use the service.
    #[error("no principal is configured; add at least one token or client certificate")]
    Nobody,
    /// Two principals have the same credential.
    #[error("{0:?} and {1:?} have the same credential; give each its own")]
    SameCredential(String, String),
    /// Two principals have the same name.
    #[error("principal {0:?} is listed twice")]
    SameName(String),
}

type Entry = (Credential, Arc<Principal>);

/// Identifies callers.
#[derive(Clone, Debug)]
pub struct Access {
    /// The principals. None: every caller is an administrator.
    principals: Option<Arc<[Entry]>>,
}

impl Access {
    /// Every caller may do everything. [`super::serve`] accepts this only on a loopback address.
    #[must_use]
    pub fn open() -> Self {
        Self { principals: None }
    }

    /// Only these principals have access.
    ///
    /// # Errors
    /// The mistake in the list; no message shows a token.
    pub fn only(
        principals: impl IntoIterator<Item = (Credential, Principal)>,
    ) -> Result<Self, AccessError> {
        let mut list: Vec<Entry> = Vec::new();
        for (credential, principal) in principals {
            for (other, holder) in &list {
                if holder.name == principal.name {
                    return Err(AccessError::SameName(principal.name));
                }
                if *other == credential {
                    return Err(AccessError::SameCredential(holder.name.clone(), principal.name));
                }
            }
            list.push((credential, Arc::new(principal)));
        }
        if list.is_empty() {
            return Err(AccessError::Nobody);
        }
        Ok(Self { principals: Some(list.into()) })
    }

    /// True if every caller may do everything.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.principals.is_none()
    }

    /// The principal with this token.
    pub(super) fn by_token(&self, token: &[u8]) -> Option<Arc<Principal>> {
        by_token(self.principals.as_deref()?, token).cloned()
    }

    /// The principal with this client certificate, in DER.
    pub(super) fn by_certificate(&self, leaf: &[u8]) -> Option<Arc<Principal>> {
        holder(self.principals.as_deref()?, leaf).cloned()
    }

    /// Identifies the sender of a request. If a token is given, it alone decides.
    pub(super) fn identify<T>(&self, request: &Request<T>) -> Result<Arc<Principal>, Status> {
        let Some(principals) = &self.principals else {
            return Ok(Arc::new(Principal::new("anybody", Role::Admin)));
        };
        let found = match bearer(request.metadata())? {
            Some(token) => by_token(principals, token),
            None => by_certificate(principals, request),
        };
        // All failures have the same message, which gives an attacker no information.
        found.cloned().ok_or_else(|| {
            unauthenticated("unknown or missing credential; send `authorization: Bearer <token>`")
        })
    }
}

fn unauthenticated(message: &str) -> Status {
    refuse(Status::unauthenticated(message))
}

fn bearer(metadata: &MetadataMap) -> Result<Option<&[u8]>, Status> {
    let mut values = metadata.get_all("authorization").iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(unauthenticated("more than one `authorization` header"));
    }
    let bytes = value.as_bytes();
    match bytes.split_at_checked("bearer ".len()) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"bearer ") => Ok(Some(token)),
        Some(_) | None => Err(unauthenticated("`authorization` must be `Bearer <token>`")),
    }
}

/// Compares with every token's digest, each in constant time, so that timing reveals neither how
/// much of a guess was right nor whose token it resembles.
fn by_token<'a>(principals: &'a [Entry], given: &[u8]) -> Option<&'a Arc<Principal>> {
    if !TOKEN_BYTES.contains(&given.len()) {
        return None;
    }
    let given = sha256(given);
    let mut found = None;
    for (credential, principal) in principals {
        let same = match credential {
            Credential::Token(digest) => digest.ct_eq(&given),
            Credential::Certificate(_) => Choice::from(0),
        };
        if bool::from(same) {
            found = Some(principal);
        }
    }
    found
}

fn by_certificate<'a, T>(
    principals: &'a [Entry],
    request: &Request<T>,
) -> Option<&'a Arc<Principal>> {
    let chain = request.peer_certs()?;
    holder(principals, chain.first()?.as_ref())
}

/// The principal with this certificate.
fn holder<'a>(principals: &'a [Entry], leaf: &[u8]) -> Option<&'a Arc<Principal>> {
    principals.iter().find_map(|(credential, principal)| match credential {
        Credential::Certificate(der) if der.as_slice() == leaf => Some(principal),
        Credential::Certificate(_) | Credential::Token(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "correct-horse-battery";

    fn access() -> Access {
        let token = |text: &str| Credential::token(text).unwrap();
        Access::only([
            (token("another-token-of-someone"), Principal::new("other", Role::Read)),
            (token(TOKEN), Principal::new("app", Role::Write)),
        ])
        .unwrap()
    }

    fn identify(header: Option<&str>) -> Result<String, Status> {
        let mut request = Request::new(());
        if let Some(header) = header {
            request.metadata_mut().insert("authorization", header.parse().unwrap());
        }
        access().identify(&request).map(|principal| principal.name.clone())
    }

    #[test]
    fn the_right_token_names_its_principal() {
        assert_eq!(identify(Some(&format!("Bearer {TOKEN}"))).unwrap(), "app");
        assert_eq!(identify(Some(&format!("bearer {TOKEN}"))).unwrap(), "app");
    }

    #[test]
    fn any_other_header_is_unauthenticated_and_not_repeated() {
        let long = format!("Bearer {}", "x".repeat(1 << 20));
        let prefix = format!("Bearer {}", &TOKEN[..TOKEN.len() - 1]);
        let longer = format!("Bearer {TOKEN}x");
        let cases =
            [None, Some(""), Some("Bearer "), Some("Bearer"), Some("Basic YTpi"), Some(TOKEN)];
        for header in cases.into_iter().chain([Some(&*long), Some(&*prefix), Some(&*longer)]) {
            let status = identify(header).unwrap_err();
            assert_eq!(status.code(), tonic::Code::Unauthenticated);
            assert!(!status.message().contains("horse"), "a secret in {:?}", status.message());
            assert_eq!(status.metadata().get("orthodrome-effect").unwrap(), "none");
        }
    }

    #[test]
    fn two_tokens_are_one_too_many() {
        let mut request = Request::new(());
        for _ in 0..2 {
            let value = format!("Bearer {TOKEN}").parse().unwrap();
            request.metadata_mut().append("authorization", value);
        }
        assert!(access().identify(&request).is_err());
    }

    #[test]
    fn lists_that_would_let_in_the_wrong_people_are_refused() {
        let entry = |token: &str, name: &str| {
            (Credential::token(token).unwrap(), Principal::new(name, Role::Read))
        };
        let cases = [
            (vec![], "no principal"),
            (vec![entry(TOKEN, "a"), entry(TOKEN, "b")], "\"a\" and \"b\""),
            (vec![entry(TOKEN, "a"), entry("another-token-of-someone", "a")], "twice"),
        ];
        for (list, expected) in cases {
            let message = Access::only(list).unwrap_err().to_string();
            assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
            assert!(!message.contains(TOKEN));
        }
    }

    #[test]
    fn a_token_may_be_given_by_its_digest() {
        // printf %s correct-horse-battery | sha256sum
        let digest = "62249369389075490555a758353aec61500c6218fa597252d52dc4bd0148f12d";
        assert_eq!(Credential::token_sha256(digest), Credential::token(TOKEN));
        assert_eq!(Credential::token_sha256(&digest.to_uppercase()), Credential::token(TOKEN));
        for wrong in ["", "ab", &digest[1..], &digest.replace('a', "g"), &"é".repeat(32)] {
            assert!(Credential::token_sha256(wrong).is_err(), "{wrong}");
        }
        for wrong in ["short", "sixteen chars ok", &"x".repeat(257)] {
            assert!(Credential::token(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_debug_form_shows_a_token() {
        assert!(!format!("{:?}", access()).contains("horse"));
    }

    #[test]
    fn roles_include_those_below() {
        let writer = Principal::new("w", Role::Write);
        assert!(writer.require(DEFAULT_KEYSPACE, Role::Read).is_ok());
        assert!(writer.require(DEFAULT_KEYSPACE, Role::Write).is_ok());
        let denied = writer.require(DEFAULT_KEYSPACE, Role::Admin).unwrap_err();
        assert_eq!(denied.code(), tonic::Code::PermissionDenied);
        assert!(writer.require("elsewhere", Role::Read).is_err());
    }
}
