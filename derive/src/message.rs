//! What hosts and leaders ask of a message, from the definitions of its variants.

use proc_macro2::{TokenStream, TokenTree};
use quote::{format_ident, quote};
use syn::parse::ParseStream;
use syn::spanned::Spanned as _;
use syn::{Attribute, Data, DeriveInput, Error, Fields, Ident, Path, Token, Type, Variant};

/// An expression up to the next comma outside of brackets. It is not parsed, so that `syn` need not
/// know all of Rust.
struct Expr(Vec<TokenTree>);

impl syn::parse::Parse for Expr {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut tokens = Vec::new();
        while !input.is_empty() && !input.peek(Token![,]) {
            tokens.push(input.parse()?);
        }
        Ok(Self(tokens))
    }
}

impl quote::ToTokens for Expr {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        tokens.extend(self.0.iter().cloned());
    }
}

/// The options of `#[message(…)]` on a variant.
#[derive(Default)]
struct Options {
    kind: Option<Expr>,
    txn: Option<Expr>,
    keys: Option<Expr>,
    held: Option<Expr>,
    to: Option<Expr>,
    led: Option<Expr>,
    control: bool,
}

fn options(attributes: &[Attribute]) -> syn::Result<Options> {
    let mut options = Options::default();
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("message")) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("control") {
                options.control = true;
                return Ok(());
            }
            let slot = match meta.path.get_ident().map(Ident::to_string).as_deref() {
                Some("kind") => &mut options.kind,
                Some("txn") => &mut options.txn,
                Some("keys") => &mut options.keys,
                Some("held") => &mut options.held,
                Some("to") => &mut options.to,
                Some("led") => &mut options.led,
                _ => return Err(meta.error("expected kind, txn, keys, held, to, led or control")),
            };
            *slot = Some(meta.value()?.parse()?);
            Ok(())
        })?;
    }
    Ok(options)
}

/// The function named by `#[message(size = path)]` on the type.
fn size(attributes: &[Attribute]) -> syn::Result<Option<Path>> {
    let mut found = None;
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("message")) {
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("size") {
                return Err(meta.error("expected size"));
            }
            found = Some(meta.value()?.parse()?);
            Ok(())
        })?;
    }
    Ok(found)
}

/// The optional value of `expr`: that of a field, or of a field of a field, is always there.
fn optional(expr: Option<&Expr>) -> TokenStream {
    let Some(expr) = expr else { return quote!(None) };
    let is_called = expr.0.iter().any(|token| matches!(token, TokenTree::Group(_)));
    match expr.0.as_slice() {
        [TokenTree::Ident(field)] => quote!(Some(*#field)),
        _ if is_called => quote!(#expr),
        _ => quote!(Some(#expr)),
    }
}

/// The transaction in the field `txn`, if there is one.
fn txn_field(fields: &Fields) -> TokenStream {
    let field = fields.iter().find(|field| field.ident.as_ref().is_some_and(|name| name == "txn"));
    let is_option = |of: &Type| {
        let Type::Path(path) = of else { return false };
        path.path.segments.last().is_some_and(|last| last.ident == "Option")
    };
    match field {
        None => quote!(None),
        Some(field) if is_option(&field.ty) => quote!(*txn),
        Some(_) => quote!(Some(*txn)),
    }
}

/// The pattern that binds the fields of a variant: to their names, or to `f0` and so on.
fn pattern(variant: &Variant) -> TokenStream {
    let ident = &variant.ident;
    match &variant.fields {
        Fields::Named(fields) => {
            let names = fields.named.iter().filter_map(|field| field.ident.as_ref());
            quote!(Self::#ident { #(#names),* })
        }
        Fields::Unnamed(fields) => {
            let names = (0..fields.unnamed.len()).map(|at| format_ident!("f{at}"));
            quote!(Self::#ident(#(#names),*))
        }
        Fields::Unit => quote!(Self::#ident),
    }
}

fn variants(input: &DeriveInput) -> syn::Result<Vec<(TokenStream, &Variant, Options)>> {
    let Data::Enum(data) = &input.data else {
        return Err(Error::new(input.span(), "only an enum has kinds of messages"));
    };
    let all = data.variants.iter();
    all.map(|variant| Ok((pattern(variant), variant, options(&variant.attrs)?))).collect()
}

/// The arms of a match that gives the name of a message.
fn kinds(variants: &[(TokenStream, &Variant, Options)]) -> TokenStream {
    let arms = variants.iter().map(|(pattern, variant, options)| {
        let name = variant.ident.to_string();
        match &options.kind {
            Some(kind) => quote!(#pattern => #kind),
            None => quote!(#pattern => #name),
        }
    });
    quote!(#(#arms,)*)
}

pub fn expand_kind(input: &DeriveInput) -> syn::Result<TokenStream> {
    let (name, arms) = (&input.ident, kinds(&variants(input)?));
    let (impl_generics, type_generics, clause) = input.generics.split_for_impl();
    Ok(quote! {
        impl #impl_generics #name #type_generics #clause {
            /// The name of the message, as in its paper.
            #[must_use]
            #[allow(unused_variables)]
            pub fn kind(&self) -> &'static str {
                match self { #arms }
            }
        }
    })
}

pub fn expand(input: &DeriveInput) -> syn::Result<TokenStream> {
    let name = &input.ident;
    let size = match size(&input.attrs)? {
        Some(path) => quote!(#path(self)),
        None => quote!(::orthodrome_core::wire::Wire::size(self)),
    };
    let variants = variants(input)?;
    let arms = |value: &dyn Fn(&Variant, &Options) -> TokenStream| {
        let arms = variants.iter().map(|(pattern, variant, options)| {
            let value = value(variant, options);
            quote!(#pattern => #value)
        });
        quote!(match self { #(#arms,)* })
    };
    let kind = kinds(&variants);
    let txn = arms(&|variant, options| match &options.txn {
        None => txn_field(&variant.fields),
        given => optional(given.as_ref()),
    });
    let keys = arms(&|_, options| options.keys.as_ref().map_or(quote!(0), |keys| quote!(#keys)));
    let held = arms(&|_, options| match (&options.held, &options.keys) {
        (Some(held), _) => quote!(#held),
        (None, Some(keys)) => quote!(#keys),
        (None, None) => quote!(0),
    });
    let lane = arms(&|_, options| {
        let lane = if options.control { quote!(Control) } else { quote!(Data) };
        quote!(::orthodrome_core::machine::Lane::#lane)
    });
    let mut routes = TokenStream::new();
    if variants.iter().any(|(_, _, options)| options.to.is_some()) {
        let to = arms(&|_, options| optional(options.to.as_ref()));
        routes.extend(quote! {
            /// The partition that the receiver serves and that this message is for. None if the
            /// message is for the node itself.
            #[must_use]
            pub fn partition(&self) -> Option<::orthodrome_core::id::PartitionId> { #to }
        });
    }
    if variants.iter().any(|(_, _, options)| options.led.is_some()) {
        let led = arms(&|_, options| optional(options.led.as_ref()));
        routes.extend(quote! {
            /// The partition for which only its leader sends this message: the receiver learns the
            /// leader.
            #[must_use]
            pub fn led_by_sender(&self) -> Option<::orthodrome_core::id::PartitionId> { #led }
        });
    }
    Ok(quote! {
        #[allow(unused_variables, clippy::all, clippy::pedantic)]
        impl #name {
            #routes
        }

        #[allow(unused_variables, clippy::all, clippy::pedantic)]
        impl ::orthodrome_core::machine::Message for #name {
            fn kind(&self) -> &'static str {
                match self { #kind }
            }
            fn txn(&self) -> Option<::orthodrome_core::id::TxnId> { #txn }
            fn wire_size(&self) -> usize { #size }
            fn keys(&self) -> usize { #keys }
            fn keys_held(&self, holds: &dyn Fn(&::orthodrome_core::txn::Key) -> bool) -> usize { #held }
            fn lane(&self) -> ::orthodrome_core::machine::Lane { #lane }
        }
    })
}
