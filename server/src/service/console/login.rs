//! The form for a token, and the cookie that keeps it.

use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, COOKIE, HOST, HeaderMap, HeaderValue, SET_COOKIE};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tonic::metadata::MetadataMap;

use super::{Console, redirect};
use crate::service::access::{DEFAULT_KEYSPACE, Role};

/// The name of the cookie. Its value is the token in Base64, because tokens may have characters
/// that a cookie cannot have.
const NAME: &str = "orthodrome_token";
/// Bytes of a form. A token has at most 256, and each may take three in a form.
const FORM_MAX: usize = 1 << 10;

/// Stores the token of the form in a cookie, if it is one of a principal that may read.
pub(super) async fn login(State(console): State<Console>, request: Request) -> Response {
    let _admitted = match console.service.inner.admission.admit() {
        Ok(admitted) => admitted,
        Err(status) => return super::refusal(&status),
    };
    let (parts, body) = request.into_parts();
    if is_foreign(&parts.headers) {
        return (StatusCode::FORBIDDEN, "the form was sent from another site\n").into_response();
    }
    let Ok(form) = to_bytes(body, FORM_MAX).await else {
        return (StatusCode::PAYLOAD_TOO_LARGE, "a token has at most 256 characters\n")
            .into_response();
    };
    let token = field(&form, b"token").unwrap_or_default();
    let token = token.trim_ascii();
    let mut asked = tonic::Request::new(());
    *asked.extensions_mut() = parts.extensions;
    if let Some(header) = bearer(token) {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, header);
        *asked.metadata_mut() = MetadataMap::from_headers(headers);
    }
    let found = console.access.identify(&asked);
    let allowed = found.and_then(|principal| principal.require(DEFAULT_KEYSPACE, Role::Read));
    if let Err(status) = allowed {
        return console.ask(&status, true);
    }
    let mut response = redirect("/console");
    if let Some(cookie) = cookie(token, console.is_tls) {
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
    response
}

/// Removes the cookie.
pub(super) async fn logout(State(_): State<Console>, request: Request) -> Response {
    if is_foreign(request.headers()) {
        return (StatusCode::FORBIDDEN, "the form was sent from another site\n").into_response();
    }
    let mut response = redirect("/console");
    response.headers_mut().insert(SET_COOKIE, no_cookie());
    response
}

/// True if a browser says that another site's page sent the request.
fn is_foreign(headers: &HeaderMap) -> bool {
    headers.get("sec-fetch-site").is_some_and(|site| site == "cross-site" || site == "same-site")
}

/// The request for [`super::Access`], with the token of the cookie if it has no other.
pub(super) fn with_token(request: &Request) -> tonic::Request<()> {
    let mut headers = request.headers().clone();
    if !headers.contains_key(AUTHORIZATION)
        && let Some(header) = token_of(&headers).as_deref().and_then(bearer)
    {
        headers.insert(AUTHORIZATION, header);
    }
    let metadata = MetadataMap::from_headers(headers);
    tonic::Request::from_parts(metadata, request.extensions().clone(), ())
}

/// True if the request has a cookie of the form.
pub(super) fn has_cookie(headers: &HeaderMap) -> bool {
    value_of(headers).is_some()
}

fn value_of(headers: &HeaderMap) -> Option<&str> {
    let texts = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs =
        texts.flat_map(|text| text.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| *name == NAME).map(|(_, value)| value)
}

fn token_of(headers: &HeaderMap) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(value_of(headers)?).ok()
}

/// The header with a token; none if it cannot be one.
fn bearer(token: &[u8]) -> Option<HeaderValue> {
    if token.is_empty() || !token.iter().all(u8::is_ascii_graphic) {
        return None;
    }
    let mut header = HeaderValue::from_bytes(&[b"Bearer ", token].concat()).ok()?;
    header.set_sensitive(true);
    Some(header)
}

fn cookie(token: &[u8], is_tls: bool) -> Option<HeaderValue> {
    let secure = if is_tls { "; Secure" } else { "" };
    let value = URL_SAFE_NO_PAD.encode(token);
    let text = format!("{NAME}={value}; Path=/console; HttpOnly; SameSite=Strict{secure}");
    let mut cookie = HeaderValue::try_from(text).ok()?;
    cookie.set_sensitive(true);
    Some(cookie)
}

pub(super) fn no_cookie() -> HeaderValue {
    HeaderValue::from_static(
        "orthodrome_token=; Path=/console; Max-Age=0; HttpOnly; SameSite=Strict",
    )
}

/// The content of a field of a form that a browser encoded.
fn field(form: &[u8], name: &[u8]) -> Option<Vec<u8>> {
    let fields = form.split(|byte| *byte == b'&');
    let mut values = fields.filter_map(|field| field.strip_prefix(name)?.strip_prefix(b"="));
    let mut rest = values.next()?;
    let mut value = Vec::with_capacity(rest.len());
    while let Some((first, after)) = rest.split_first() {
        let digits = after.split_at_checked(2);
        let hex = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        match (first, digits.and_then(|(pair, after)| Some((hex(pair)?, after)))) {
            (b'%', Some((byte, after))) => {
                value.push(byte);
                rest = after;
            }
            (first, _) => {
                value.push(if *first == b'+' { b' ' } else { *first });
                rest = after;
            }
        }
    }
    Some(value)
}

/// True if the request names this machine by an address or as `localhost`. A page of another site
/// can make a browser connect here by giving its own name this address (DNS rebinding); then the
/// request has that name.
pub(super) fn is_local_name(request: &Request) -> bool {
    let header = || request.headers().get(HOST).and_then(|host| host.to_str().ok());
    let named = request.uri().authority().map(|authority| authority.as_str()).or_else(header);
    let Some(named) = named else { return true };
    let host = match named.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(host, _)| host),
        None => named.split_once(':').map_or(named, |(host, _)| host),
    };
    host.eq_ignore_ascii_case("localhost") || host.parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_a_form_are_decoded() {
        let find =
            |form: &str| field(form.as_bytes(), b"token").map(|v| String::from_utf8(v).unwrap());
        for (form, expected) in [
            ("token=abc", Some("abc")),
            ("x=1&token=a%2Bb%26c%3D%25+d&y=2", Some("a+b&c=% d")),
            ("token=%zz%4", Some("%zz%4")),
            ("token=", Some("")),
            ("tokens=a", None),
            ("", None),
        ] {
            assert_eq!(find(form).as_deref(), expected, "{form}");
        }
    }

    #[test]
    fn a_cookie_has_any_token_and_comes_back() {
        let token = br#"a;b,"c"=d\e%~!0123456789"#;
        let set = cookie(token, true).unwrap();
        let set = set.to_str().unwrap();
        for flag in ["HttpOnly", "SameSite=Strict", "Secure", "Path=/console"] {
            assert!(set.split("; ").any(|part| part == flag), "{set}");
        }
        assert!(!cookie(token, false).unwrap().to_str().unwrap().contains("Secure"));
        let (pair, _) = set.split_once(';').unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(COOKIE, format!("a=b; {pair}; c=d").parse().unwrap());
        assert_eq!(token_of(&headers).as_deref(), Some(token.as_slice()));
        headers.insert(COOKIE, format!("other_{pair}").parse().unwrap());
        assert_eq!(token_of(&headers), None);
    }

    #[test]
    fn a_name_of_another_site_is_not_local() {
        let is_local = |host: &str| {
            let request = Request::builder().uri("/console").header(HOST, host);
            is_local_name(&request.body(axum::body::Body::empty()).unwrap())
        };
        for host in ["localhost", "LOCALHOST:7400", "127.0.0.1:7400", "[::1]:7400", "10.0.0.1"] {
            assert!(is_local(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:7400", "127.0.0.1.evil.example", ""] {
            assert!(!is_local(host), "{host}");
        }
    }
}
