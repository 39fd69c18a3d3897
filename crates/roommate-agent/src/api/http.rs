//! The requests of [`crate::api::control`] over HTTP, if enabled: `POST /v1/VERB` with the fields
//! of the request as JSON and the token as bearer.
//!
//! A connection carries one request, as on the socket. Two checks protect against web pages in a
//! user's browser: a page has no token, and after DNS rebinding its `Host` is not one that is
//! accepted here.

use crate::AgentError;
use crate::api::Call;
use crate::api::control::{self, Reply, Request};
use crate::paths::Paths;
use crate::process::{Deliver, small_thread};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Longest head of a request, in bytes.
const LONGEST_HEAD: usize = 16 << 10;
const MOST_HEADERS: usize = 64;
/// How long a client may take to send its request.
const PATIENCE: Duration = Duration::from_secs(10);
const MOST_CONNECTIONS: usize = 64;
const PREFIX: &str = "/v1/";

/// Where to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Http {
    /// The address; port 0 = any that is free.
    pub at: SocketAddr,
    /// Whether other machines may connect. The connection is not encrypted.
    pub beyond_loopback: bool,
}

/// Listens, and creates the token if there is none.
pub(crate) fn listen(http: Http, paths: &Paths) -> Result<(TcpListener, String), AgentError> {
    if !http.at.ip().is_loopback() && !http.beyond_loopback {
        return Err(AgentError::refused(
            format!(
                "{} can be reached from other machines, and the connection is not encrypted",
                http.at.ip()
            ),
            "use 127.0.0.1 and a tunnel (ssh -L), or --http-beyond-loopback on a private network",
        ));
    }
    let listener = TcpListener::bind(http.at).map_err(|e| {
        AgentError::refused(
            format!("could not listen at {}: {e}", http.at),
            "port 0 takes any free port",
        )
    })?;
    Ok((listener, token(&paths.token())?))
}

/// The token of this state, which only its owner can read; created on first use.
fn token(path: &Path) -> Result<String, AgentError> {
    if let Ok(text) = fs::read_to_string(path) {
        let closed = fs::set_permissions(path, fs::Permissions::from_mode(0o600));
        closed.map_err(AgentError::file("restrict access to", path))?;
        let token = text.trim();
        if token.len() >= 32 {
            return Ok(token.into());
        }
    }
    let mut halves = [[0; 16]; 2];
    let source = Path::new("/dev/urandom");
    let read = File::open(source).and_then(|mut f| f.read_exact(halves.as_flattened_mut()));
    read.map_err(AgentError::file("read", source))?;
    let [a, b] = halves.map(u128::from_ne_bytes);
    let token = format!("{a:032x}{b:032x}");
    let _ = fs::remove_file(path);
    let file = File::options().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut f| f.write_all(format!("{token}\n").as_bytes()));
    written.map_err(AgentError::file("write", path))?;
    Ok(token)
}

/// Serves users, each in a thread, until the process ends.
pub(crate) fn serve(listener: &TcpListener, token: &str, to: &Deliver<Call>, paths: &Paths) {
    let Ok(here) = listener.local_addr() else { return };
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming().flatten() {
        if open.fetch_add(1, Ordering::Relaxed) >= MOST_CONNECTIONS {
            open.fetch_sub(1, Ordering::Relaxed);
            let _ = stream.set_write_timeout(Some(Duration::from_millis(50)));
            Answer::no(503, "too many connections", None).send(&stream);
            continue;
        }
        let (token, to, paths, count) =
            (token.to_string(), Arc::clone(to), paths.clone(), Arc::clone(&open));
        let spawned = small_thread("http", move || {
            let _ = stream.set_write_timeout(Some(PATIENCE));
            let answer = converse(&stream, here, &token, &to, &paths);
            answer.unwrap_or_else(|refusal| refusal).send(&stream);
            // Unread input is drained: closing with unread data resets the connection, and the
            // reply could be lost.
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
            let _ = io::copy(&mut (&stream).take(1 << 20), &mut io::sink());
            count.fetch_sub(1, Ordering::Relaxed);
        });
        if spawned.is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A response.
struct Answer {
    status: u16,
    header: Option<&'static str>,
    reply: Reply,
}

impl Answer {
    fn no(status: u16, what: impl Into<String>, hint: Option<&str>) -> Self {
        let reply = Reply::Error { what: what.into(), hint: hint.map(Into::into) };
        Self { status, header: None, reply }
    }

    fn send(&self, mut to: &TcpStream) {
        let body = serde_json::to_vec(&self.reply).expect("a reply can always be written");
        let mut head = format!(
            "HTTP/1.1 {} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n",
            self.status,
            phrase(self.status),
            body.len() + 1
        );
        if let Some(header) = self.header {
            head += &format!("{header}\r\n");
        }
        let mut all = (head + "\r\n").into_bytes();
        all.extend(body);
        all.push(b'\n');
        let _ = to.write_all(&all);
    }
}

fn phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        411 => "Length Required",
        413 => "Content Too Large",
        421 => "Misdirected Request",
        422 => "Unprocessable Content",
        431 => "Request Header Fields Too Large",
        _ => "Service Unavailable",
    }
}

/// The head of a request.
struct Asked {
    method: String,
    path: String,
    host: Option<String>,
    bearer: Option<String>,
    length: Option<u64>,
    waits: bool,
}

fn converse(
    stream: &TcpStream,
    here: SocketAddr,
    token: &str,
    to: &Deliver<Call>,
    paths: &Paths,
) -> Result<Answer, Answer> {
    let end = Instant::now() + PATIENCE;
    let (asked, mut body) = read_head(stream, end)?;
    if !asked.host.as_deref().is_some_and(|host| is_here(host, here)) {
        let what = "the Host of the request is not this daemon";
        return Err(Answer::no(421, what, Some("use its address, or localhost")));
    }
    if !asked.bearer.is_some_and(|given| same(given.as_bytes(), token.as_bytes())) {
        let hint = "send `Authorization: Bearer TOKEN`; the token is in the file `http-token` \
                    of the daemon's state";
        let mut answer = Answer::no(401, "the daemon's token is missing or wrong", Some(hint));
        answer.header = Some("WWW-Authenticate: Bearer");
        return Err(answer);
    }
    let verb = asked.path.strip_prefix(PREFIX).filter(|v| control::VERBS.contains(v));
    let Some(verb) = verb else {
        let what = format!("no such path: {:?}", asked.path);
        let hint = format!("the paths are {PREFIX}VERB for {}", control::VERBS.join(", "));
        return Err(Answer::no(404, what, Some(&hint)));
    };
    if asked.method != "POST" {
        let what = format!("method {} is not supported", asked.method);
        let mut answer = Answer::no(405, what, Some("use POST"));
        answer.header = Some("Allow: POST");
        return Err(answer);
    }
    let Some(length) = asked.length else {
        return Err(Answer::no(
            411,
            "the length of the request is not given",
            Some("send Content-Length"),
        ));
    };
    if length > control::LONGEST_REQUEST {
        let most = control::LONGEST_REQUEST;
        let what = format!("the request has {length} bytes; at most {most} are accepted");
        return Err(Answer::no(413, what, None));
    }
    if asked.waits && (body.len() as u64) < length {
        let _ = (&*stream).write_all(b"HTTP/1.1 100 Continue\r\n\r\n");
    }
    while (body.len() as u64) < length {
        body.extend(some(stream, end)?);
    }
    body.truncate(length as usize);
    let request = request(verb, &body).map_err(|what| {
        let what = format!("the request is not valid: {what}");
        Answer::no(400, what, Some("docs/reference/http.md lists the fields of each verb"))
    })?;
    let reply = control::dispatch(request, to, paths);
    let status = if matches!(reply, Reply::Error { .. }) { 422 } else { 200 };
    Ok(Answer { status, header: None, reply })
}

/// The request made of a verb and its fields.
fn request(verb: &str, body: &[u8]) -> Result<Request, String> {
    let blank = body.iter().all(u8::is_ascii_whitespace);
    let fields: serde_json::Value = if blank {
        serde_json::json!({})
    } else {
        serde_json::from_slice(body).map_err(|e| e.to_string())?
    };
    serde_json::from_value(serde_json::json!({ verb: fields })).map_err(|e| e.to_string())
}

/// Reads some bytes; an error if the time is over or the connection closed.
fn some(mut stream: &TcpStream, end: Instant) -> Result<Vec<u8>, Answer> {
    let late = || Answer::no(408, "the request did not arrive in time", None);
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(late());
    }
    let _ = stream.set_read_timeout(Some(left));
    let mut part = vec![0; 16 << 10];
    match stream.read(&mut part) {
        Ok(0) => Err(Answer::no(400, "the request is incomplete", None)),
        Ok(got) => {
            part.truncate(got);
            Ok(part)
        }
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Vec::new()),
        Err(_) => Err(late()),
    }
}

fn read_head(stream: &TcpStream, end: Instant) -> Result<(Asked, Vec<u8>), Answer> {
    let mut bytes = Vec::new();
    loop {
        bytes.extend(some(stream, end)?);
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut head = httparse::Request::new(&mut headers);
        match head.parse(&bytes) {
            Ok(httparse::Status::Complete(length)) => {
                let asked = asked(&head)?;
                return Ok((asked, bytes.split_off(length)));
            }
            Ok(httparse::Status::Partial) if bytes.len() < LONGEST_HEAD => {}
            Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                return Err(Answer::no(431, "the head of the request is too long", None));
            }
            Err(e) => return Err(Answer::no(400, format!("this is not HTTP: {e}"), None)),
        }
    }
}

fn asked(head: &httparse::Request<'_, '_>) -> Result<Asked, Answer> {
    let one = |name: &str| -> Result<Option<String>, Answer> {
        let mut values = head.headers.iter().filter(|h| h.name.eq_ignore_ascii_case(name));
        let value = values.next().map(|h| String::from_utf8_lossy(h.value).trim().to_string());
        // A proxy in between might use the other of two differing values.
        match values.next() {
            Some(_) => Err(Answer::no(400, format!("{name} is given twice"), None)),
            None => Ok(value),
        }
    };
    let length = match one("content-length")? {
        Some(text) => {
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            let number = text.parse().ok().filter(|_| digits);
            Some(number.ok_or_else(|| Answer::no(400, "Content-Length is not a number", None))?)
        }
        None => None,
    };
    let bearer = one("authorization")?;
    let bearer = bearer.as_deref().and_then(|v| v.split_once(' '));
    Ok(Asked {
        method: head.method.unwrap_or_default().into(),
        path: head.path.unwrap_or_default().into(),
        host: one("host")?,
        bearer: bearer
            .filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"))
            .map(|(_, t)| t.trim().into()),
        length: if one("transfer-encoding")?.is_some() { None } else { length },
        waits: one("expect")?.is_some_and(|v| v.eq_ignore_ascii_case("100-continue")),
    })
}

/// Whether a `Host` is this daemon: an IP address, `localhost`, or beyond loopback the host's name.
fn is_here(host: &str, here: SocketAddr) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, port.parse().ok()),
        _ => (host, Some(80)),
    };
    if port != Some(here.port()) {
        return false;
    }
    let bare = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')).unwrap_or(name);
    let own = || fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    bare.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok()
        || (!here.ip().is_loopback() && bare.eq_ignore_ascii_case(own().trim()))
}

/// Compares two secrets in constant time.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differ = a.iter().zip(b).fold(0, |d, (a, b)| std::hint::black_box(d | (a ^ b)));
    a.len() == b.len() && differ == 0
}

/// Sends a request over HTTP.
pub(crate) fn ask(server: &str, token: &str, request: &Request) -> Result<Reply, AgentError> {
    let address = address(server)?;
    let no_daemon = |error| AgentError::NoServer { server: server.into(), error };
    let lost = |error| AgentError::Lost { error };
    let mut stream = TcpStream::connect(address).map_err(no_daemon)?;
    stream.set_read_timeout(Some(control::ANSWER_WITHIN)).map_err(no_daemon)?;
    let tagged = serde_json::to_value(request).expect("a request can always be written");
    let (verb, fields) = tagged
        .as_object()
        .and_then(|o| o.iter().next())
        .expect("a request is an object with one member");
    let body = fields.to_string();
    let head = format!(
        "POST {PREFIX}{verb} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).map_err(lost)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).map_err(lost)?;
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut head = httparse::Response::new(&mut headers);
    let odd = |what: &str| lost(io::Error::new(io::ErrorKind::InvalidData, what.to_string()));
    let length = match head.parse(&answer) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Err(odd("the response is incomplete")),
        Err(e) => return Err(odd(&format!("the response is not HTTP: {e}"))),
    };
    control::read_reply(&answer[length..])
}

/// The address in `http://HOST:PORT`.
fn address(server: &str) -> Result<SocketAddr, AgentError> {
    let wrong = |what: &str| {
        AgentError::refused(
            format!("{server:?}: {what}"),
            "a server is given as http://127.0.0.1:PORT",
        )
    };
    let rest = server.strip_prefix("http://").ok_or_else(|| wrong("only http:// is supported"))?;
    let rest = rest.trim_end_matches('/');
    let found =
        std::net::ToSocketAddrs::to_socket_addrs(rest).map_err(|e| wrong(&e.to_string()))?;
    found.into_iter().next().ok_or_else(|| wrong("it has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_localhost_are_accepted_as_host() {
        let here: SocketAddr = "127.0.0.1:8080".parse().unwrap();
        for host in ["127.0.0.1:8080", "localhost:8080", "[::1]:8080", "LOCALHOST:8080"] {
            assert!(is_here(host, here), "{host}");
        }
        for host in
            ["evil.example:8080", "127.0.0.1", "localhost:80", "", "127.0.0.1.evil.example:8080"]
        {
            assert!(!is_here(host, here), "{host}");
        }
    }

    #[test]
    fn only_equal_secrets_compare_equal() {
        assert!(same(b"secret", b"secret"));
        assert!(!same(b"secret", b"secreT") && !same(b"secret", b"secre") && !same(b"", b"s"));
    }

    #[test]
    fn a_token_is_created_once_and_only_the_owner_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("http-token");
        let made = token(&path).unwrap();
        assert_eq!(made.len(), 64);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(token(&path).unwrap(), made);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, "short").unwrap();
        assert_ne!(token(&path).unwrap(), "short");
    }

    #[test]
    fn every_verb_is_known() {
        for verb in control::VERBS {
            let error = request(verb, b"{\"nonsense\": 1}").unwrap_err();
            assert!(!error.contains("unknown variant"), "{verb}: {error}");
        }
        assert_eq!(request("ps", b" ").unwrap(), Request::Ps {});
        assert!(request("nothing", b"").unwrap_err().contains("unknown variant"));
    }
}
