//! Tokens of HTTP clients: each belongs to a user, carries some of that user's rights, and expires.
//! Only their hashes are stored; a secret is shown once, when it is created.
//!
//! A daemon of one user has a token of its own besides, in the file `http-token`: local clients
//! read it there.

use crate::AgentError;
use crate::api::caller::{Caller, Mode, Scope, User};
use crate::api::control::{Reply, TokenView, TokenWanted};
use crate::os::{Os, disk};
use crate::paths::Paths;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{io, str};

/// Most tokens of one user.
const MOST_EACH: usize = 64;
/// Longest file of tokens in bytes.
const LONGEST_FILE: u64 = 16 << 20;
/// Longest name in characters.
const LONGEST_NAME: usize = 64;
/// Shortest and longest life of a token in seconds: a minute and ten years.
const LIFE_S: std::ops::RangeInclusive<f64> = 60.0..=10.0 * 365.0 * 86_400.0;
/// Length of a secret: 32 random bytes in hexadecimal.
const SECRET_CHARS: usize = 64;

/// A token as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Token {
    id: String,
    name: Option<String>,
    user: User,
    scope: Scope,
    expires_unix_s: u64,
    /// Hash of its secret, in hexadecimal.
    sha256: String,
}

/// The tokens of a state.
pub(crate) struct Tokens {
    path: PathBuf,
    os: Os,
    kept: Mutex<Vec<Token>>,
    /// Hash of the daemon's own token.
    own: Option<String>,
}

impl Tokens {
    pub(crate) fn open(paths: &Paths, os: Os) -> Result<Self, AgentError> {
        let path = paths.tokens();
        let read = match os.disk.read(&path, LONGEST_FILE) {
            Ok(text) => serde_json::from_slice(&text).map_err(io::Error::from),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        };
        let kept = read.map_err(|e| {
            let what =
                format!("could not read the tokens in {:?}: {e}", path.display().to_string());
            AgentError::refused(what, "without the file, all tokens are revoked")
        })?;
        Ok(Self { path, os, kept: Mutex::new(kept), own: None })
    }

    /// Also accepts the token in the daemon's own file, which is created on first use.
    pub(crate) fn with_own(mut self, path: &Path) -> Result<Self, AgentError> {
        let kept = self.os.disk.read(path, LONGEST_FILE).unwrap_or_default();
        let kept = str::from_utf8(&kept).unwrap_or_default().trim();
        let secret = if kept.len() >= SECRET_CHARS { kept.to_string() } else { secret()? };
        // Also rewritten if it is there, so that nobody else can read it.
        let written = disk::replace(&*self.os.disk, path, format!("{secret}\n").as_bytes());
        written.map_err(AgentError::file("write", path))?;
        self.own = Some(hash(&secret));
        Ok(self)
    }

    /// The caller who has this secret.
    pub(crate) fn caller(&self, secret: &str, mode: Mode) -> Option<Caller> {
        let given = hash(secret);
        let own = self.own.as_ref().is_some_and(|own| same(own.as_bytes(), given.as_bytes()));
        let now_s = self.now_s();
        let mut found = None;
        // All are compared, so that the time does not tell which one was nearly right.
        for token in self.lock().iter() {
            if same(token.sha256.as_bytes(), given.as_bytes()) && now_s < token.expires_unix_s {
                found = Some((token.user.clone(), token.scope));
            }
        }
        if own {
            return Some(Caller::this());
        }
        let (user, scope) = found?;
        // The number may have been given to another user since.
        let still = User::of(user.uid) == user;
        mode.caller(user).filter(|_| still).map(|caller| caller.with(scope))
    }

    /// Creates a token.
    pub(crate) fn create(&self, caller: &Caller, mode: Mode, wanted: TokenWanted) -> Reply {
        let user = match owner_of(&wanted, caller, mode) {
            Ok(user) => user,
            Err(refusal) => return refusal,
        };
        let printable = |n: &String| n.chars().all(|c| !c.is_control());
        let fits = |n: &String| (1..=LONGEST_NAME).contains(&n.chars().count()) && printable(n);
        if wanted.name.as_ref().is_some_and(|n| !fits(n)) {
            let what = format!("the name of a token has 1 to {LONGEST_NAME} printable characters");
            return Reply::error(what, "leave it out, or choose a shorter one");
        }
        if !LIFE_S.contains(&wanted.expires_s) {
            return Reply::error("a token expires after a minute to ten years", "give 30d, or 12h");
        }
        let now_s = self.now_s();
        let mut kept = self.lock();
        let mut next: Vec<Token> =
            kept.iter().filter(|t| now_s < t.expires_unix_s).cloned().collect();
        let used = next.iter().filter(|t| t.user.uid == user.uid).count();
        if used >= MOST_EACH {
            let what = format!("{} has {used} tokens, and {MOST_EACH} is the most", user.name);
            return Reply::error(what, "`roommate token revoke ID` ends one");
        }
        let secret = match secret() {
            Ok(secret) => secret,
            Err(e) => return e.into(),
        };
        let token = Token {
            // Its hash identifies it as well as any number, and says nothing about it.
            id: hash(&secret)[..8].into(),
            name: wanted.name,
            user,
            scope: wanted.scope,
            expires_unix_s: now_s + wanted.expires_s as u64,
            sha256: hash(&secret),
        };
        let view = token.view(now_s);
        next.push(token);
        match self.store(&mut kept, next) {
            Ok(()) => Reply::Token { secret, token: Box::new(view) },
            Err(e) => e.into(),
        }
    }

    /// Lists the tokens of the caller; an administrator sees all.
    pub(crate) fn list(&self, caller: &Caller) -> Reply {
        let (now_s, kept) = (self.now_s(), self.lock());
        let seen = kept.iter().filter(|t| now_s < t.expires_unix_s && caller.sees(&t.user));
        Reply::Tokens(seen.map(|t| t.view(now_s)).collect())
    }

    /// Revokes a token; a request that comes later is refused.
    pub(crate) fn revoke(&self, caller: &Caller, id: &str) -> Reply {
        let mut kept = self.lock();
        let mut next = kept.clone();
        next.retain(|t| t.id != id || !caller.sees(&t.user));
        if next.len() == kept.len() {
            let hint = "`roommate token list` shows them";
            return Reply::error(format!("there is no token {id:?}"), hint);
        }
        match self.store(&mut kept, next) {
            Ok(()) => Reply::Done { what: format!("revoked token {id}") },
            Err(e) => e.into(),
        }
    }

    fn store(
        &self,
        kept: &mut MutexGuard<'_, Vec<Token>>,
        next: Vec<Token>,
    ) -> Result<(), AgentError> {
        let text = serde_json::to_vec(&next).expect("tokens can always be written");
        let written = disk::replace(&*self.os.disk, &self.path, &text);
        written.map_err(AgentError::file("write", &self.path))?;
        **kept = next;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Token>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_s(&self) -> u64 {
        self.os.unix_us() / 1_000_000
    }
}

impl Token {
    fn view(&self, now_s: u64) -> TokenView {
        TokenView {
            id: self.id.clone(),
            name: self.name.clone(),
            user: self.user.name.clone(),
            scope: self.scope,
            expires_in_s: self.expires_unix_s.saturating_sub(now_s),
        }
    }
}

/// The user for whom a token is wanted, if the caller may create it.
fn owner_of(wanted: &TokenWanted, caller: &Caller, mode: Mode) -> Result<User, Reply> {
    let own = mode.owner(caller);
    let user = match &wanted.user {
        None => own.clone(),
        Some(name) => User::named(name).ok_or_else(|| {
            Reply::error(format!("there is no user {name:?}"), "give a name or a number")
        })?,
    };
    if user.uid != own.uid && (!caller.admin || !mode.is_system()) {
        let what = format!("you may not create tokens for {}", user.name);
        return Err(Reply::error(what, "leave out --for to create one for yourself"));
    }
    let admin = mode.caller(user.clone()).is_some_and(|c| c.admin);
    if wanted.scope == Scope::Admin && !admin {
        let what = format!("{} is not an administrator", user.name);
        return Err(Reply::error(what, "`--scope operate` is for everything with own jobs"));
    }
    Ok(user)
}

/// A new secret.
pub(crate) fn secret() -> Result<String, AgentError> {
    let mut bytes = [0; SECRET_CHARS / 2];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| AgentError::Refused {
        what: "the system has no random numbers".into(),
        hint: None,
    })?;
    Ok(hex(&bytes))
}

/// SHA-256 in hexadecimal. A secret has 256 random bits, so a fast hash suffices.
fn hash(secret: &str) -> String {
    hex(digest(&SHA256, secret.as_bytes()).as_ref())
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    let digit = |n: u8| char::from_digit(n.into(), 16).expect("four bits are a digit");
    bytes.iter().flat_map(|b| [digit(b >> 4), digit(b & 15)]).collect()
}

/// Compares two secrets in constant time.
pub(crate) fn same(a: &[u8], b: &[u8]) -> bool {
    let differ = a.iter().zip(b).fold(0, |d, (a, b)| std::hint::black_box(d | (a ^ b)));
    a.len() == b.len() && differ == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    const EVERYBODY: Mode = Mode::System { group: None, admins: None };

    fn wanted(user: Option<&str>, scope: Scope) -> TokenWanted {
        TokenWanted { name: None, user: user.map(Into::into), scope, expires_s: 3600.0 }
    }

    fn secret_of(reply: Reply) -> (String, TokenView) {
        match reply {
            Reply::Token { secret, token } => (secret, *token),
            other => panic!("{other:?}"),
        }
    }

    fn error_of(reply: &Reply) -> &str {
        match reply {
            Reply::Error { what, .. } => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_equal_secrets_compare_equal() {
        assert!(same(b"secret", b"secret"));
        assert!(!same(b"secret", b"secreT") && !same(b"secret", b"secre") && !same(b"", b"s"));
    }

    #[test]
    fn the_daemons_own_token_is_created_once_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let (paths, path) = (Paths::new(folder.path()), folder.path().join("http-token"));
        let open = || Tokens::open(&paths, Os::real()).unwrap().with_own(&path).unwrap();
        open();
        let made = fs::read_to_string(&path).unwrap().trim().to_string();
        assert_eq!(made.len(), 64);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(open().caller(&made, Mode::User), Some(Caller::this()));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, "short").unwrap();
        let tokens = open();
        assert_eq!(tokens.caller("short", Mode::User), None);
        assert_eq!(tokens.caller("", Mode::User), None);
    }

    #[test]
    fn a_token_works_until_it_is_revoked_or_expires() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let tokens = Tokens::open(&paths, Os::real()).unwrap();
        let me = Caller::this();
        let made = |scope| secret_of(tokens.create(&me, Mode::User, wanted(None, scope)));
        let (read, view) = made(Scope::Read);
        let (all, _) = made(Scope::Admin);
        let text = fs::read_to_string(paths.tokens()).unwrap();
        assert!(!text.contains(&read) && text.contains(&view.id));
        assert_eq!(fs::metadata(paths.tokens()).unwrap().permissions().mode() & 0o777, 0o600);
        // A restarted daemon knows them as well.
        let again = Tokens::open(&paths, Os::real()).unwrap();
        assert_eq!(again.caller(&read, Mode::User), Some(me.clone().with(Scope::Read)));
        assert_eq!(again.caller(&all, Mode::User), Some(me.clone()));
        assert_eq!(again.caller(&all[1..], Mode::User), None);
        assert!(matches!(again.revoke(&me, &view.id), Reply::Done { .. }));
        assert_eq!(again.caller(&read, Mode::User), None);
        assert!(error_of(&again.revoke(&me, &view.id)).starts_with("there is no token"));
        again.lock()[0].expires_unix_s = 1;
        assert_eq!(again.caller(&all, Mode::User), None);
        assert_eq!(again.list(&me), Reply::Tokens(Vec::new()));
    }

    #[test]
    fn users_have_tokens_of_their_own_only() {
        let folder = tempfile::tempdir().unwrap();
        let tokens = Tokens::open(&Paths::new(folder.path()), Os::real()).unwrap();
        let caller = |uid| EVERYBODY.caller(User::of(uid)).unwrap();
        let (root, a, b) = (caller(0), caller(4_000_000_001), caller(4_000_000_002));
        let (secret, view) = secret_of(tokens.create(&a, EVERYBODY, wanted(None, Scope::Operate)));
        let found = tokens.caller(&secret, EVERYBODY).unwrap();
        assert_eq!((found.user.uid, found.admin), (4_000_000_001, false));
        assert_eq!(tokens.list(&b), Reply::Tokens(Vec::new()));
        assert!(error_of(&tokens.revoke(&b, &view.id)).starts_with("there is no token"));
        let no = |reply: Reply| error_of(&reply).to_string();
        let for_b = || wanted(Some("4000000002"), Scope::Read);
        assert!(no(tokens.create(&a, EVERYBODY, for_b())).contains("may not create tokens for"));
        assert!(no(tokens.create(&a, EVERYBODY, wanted(None, Scope::Admin))).contains("is not an"));
        assert_eq!(secret_of(tokens.create(&root, EVERYBODY, for_b())).1.user, "4000000002");
        // A token of somebody who had the number before.
        tokens.lock()[0].user.name = "earlier".into();
        assert_eq!(tokens.caller(&secret, EVERYBODY), None);
    }

    #[test]
    fn tokens_are_limited_and_checked() {
        let folder = tempfile::tempdir().unwrap();
        let tokens = Tokens::open(&Paths::new(folder.path()), Os::real()).unwrap();
        let me = Caller::this();
        let create = |wanted| tokens.create(&me, Mode::User, wanted);
        for expires_s in [0.0, f64::NAN, f64::INFINITY, -5.0] {
            let reply = create(TokenWanted { expires_s, ..wanted(None, Scope::Read) });
            assert!(error_of(&reply).starts_with("a token expires"));
        }
        for name in ["", "\u{1b}[2J", &"x".repeat(65)] {
            let name = Some(name.to_string());
            let reply = create(TokenWanted { name, ..wanted(None, Scope::Read) });
            assert!(error_of(&reply).starts_with("the name of a token"));
        }
        for _ in 0..MOST_EACH {
            secret_of(create(wanted(None, Scope::Read)));
        }
        assert!(error_of(&create(wanted(None, Scope::Read))).contains("has 64 tokens"));
        fs::write(Paths::new(folder.path()).tokens(), "[{").unwrap();
        let damaged = Tokens::open(&Paths::new(folder.path()), Os::real());
        assert!(damaged.err().unwrap().to_string().contains("could not read the tokens"));
    }
}
