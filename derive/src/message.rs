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
    to: Option<Expr>,
    led: Option<Expr>,
    groups: Vec<Ident>,
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
            if meta.path.is_ident("group") {
                options.groups.push(meta.value()?.parse()?);
                return Ok(());
            }
            let slot = match meta.path.get_ident().map(Ident::to_string).as_deref() {
                Some("kind") => &mut options.kind,
                Some("txn") => &mut options.txn,
                Some("keys") => &mut options.keys,
                Some("to") => &mut options.to,
                Some("led") => &mut options.led,
                _ => return Err(meta.error("expected kind, txn, keys, to, led, group or control")),
            };
            *slot = Some(meta.value()?.parse()?);
            Ok(())
        })?;
    }
    Ok(options)
}

/// The options of `#[message(…)]` on the type.
#[derive(Default)]
struct TypeOptions {
    size: Option<Path>,
    to: Option<Ident>,
}

fn type_options(attributes: &[Attribute]) -> syn::Result<TypeOptions> {
    let mut options = TypeOptions::default();
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("message")) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("size") {
                options.size = Some(meta.value()?.parse()?);
            } else if meta.path.is_ident("to") {
                options.to = Some(meta.value()?.parse()?);
            } else {
                return Err(meta.error("expected size or to"));
            }
            Ok(())
        })?;
    }
    Ok(options)
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
fn pattern(of: &Ident, variant: &Variant) -> TokenStream {
    let ident = &variant.ident;
    match &variant.fields {
        Fields::Named(fields) => {
            let names = fields.named.iter().filter_map(|field| field.ident.as_ref());
            quote!(#of::#ident { #(#names),* })
        }
        Fields::Unnamed(fields) => {
            let names = (0..fields.unnamed.len()).map(|at| format_ident!("f{at}"));
            quote!(#of::#ident(#(#names),*))
        }
        Fields::Unit => quote!(#of::#ident),
    }
}

fn variants(input: &DeriveInput) -> syn::Result<Vec<(TokenStream, &Variant, Options)>> {
    let Data::Enum(data) = &input.data else {
        return Err(Error::new(input.span(), "only an enum has kinds of messages"));
    };
    let all = data.variants.iter();
    let of = &input.ident;
    all.map(|variant| Ok((pattern(of, variant), variant, options(&variant.attrs)?))).collect()
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

/// Enums with only the messages of one direction, and how a message becomes one of them.
fn groups(
    name: &Ident,
    variants: &[(TokenStream, &Variant, Options)],
    to: Option<&Ident>,
) -> TokenStream {
    let mut names: Vec<&Ident> = to.into_iter().collect();
    for group in variants.iter().flat_map(|(_, _, options)| &options.groups) {
        if !names.contains(&group) {
            names.push(group);
        }
    }
    let groups = names.into_iter().map(|group| {
        let is_member = |options: &Options| {
            options.groups.contains(group) || (to == Some(group) && options.to.is_some())
        };
        let members = variants.iter().filter(|(_, _, options)| is_member(options));
        let (mut definitions, mut arms) = (Vec::new(), Vec::new());
        for (pattern, variant, _) in members {
            let mut definition = (*variant).clone();
            definition.attrs.retain(|attribute| attribute.path().is_ident("doc"));
            for field in &mut definition.fields {
                field.attrs.retain(|attribute| attribute.path().is_ident("doc"));
            }
            let value = self::pattern(group, variant);
            definitions.push(quote!(#definition));
            arms.push(quote!(#pattern => Ok(#value)));
        }
        quote! {
            /// The messages that can arrive there.
            #[derive(Debug)]
            #[allow(dead_code, clippy::large_enum_variant)]
            pub enum #group { #(#definitions),* }

            #[allow(clippy::all, clippy::pedantic, clippy::wildcard_enum_match_arm)]
            impl TryFrom<#name> for #group {
                type Error = #name;

                fn try_from(msg: #name) -> Result<Self, #name> {
                    match msg { #(#arms,)* other => Err(other) }
                }
            }
        }
    });
    groups.collect()
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
    let of_type = type_options(&input.attrs)?;
    let size = match &of_type.size {
        Some(path) => quote!(#path(self)),
        None => quote!(::orthodrome_core::wire::Wire::size(self)),
    };
    let variants = variants(input)?;
    let groups = groups(name, &variants, of_type.to.as_ref());
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
        #groups

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
            fn lane(&self) -> ::orthodrome_core::machine::Lane { #lane }
        }
    })
}
