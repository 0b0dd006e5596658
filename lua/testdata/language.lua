local r={}
local function p(...) local t={...} for i=1,select('#',...) do r[#r+1]=tostring(t[i]) end end
p(1,2.5,-3,1e100,"x",true,nil,false)
p(10/3, 10%3, -10%3, 10%-3, 5.5%2, 2^10, 2^0.5, -2^2, 7/0, -7/0)
p("10"+5, "3"*"4", 10 .. 20, "a".."b".."c"..1 ..2)
p(1==1, 1=="1", "a"<"b", "a"<="a", "Z"<"a", 1~=2, not nil, not 0)
p(1 and 2, nil and 2, false or 3, nil or false, 1 or error("no"))
local a,b,c = (function() return 1,2,3 end)() p(a,b,c)
local a,b,c = (function() return 1,2,3 end)(), 10 p(a,b,c)
local t = {(function() return 1,2,3 end)()} p(#t)
local t = {(function() return 1,2,3 end)(), 10} p(#t, t[1], t[2])
local t = {((function() return 1,2,3 end)())} p(#t)
local t = {1,2,3,x=1,["y z"]=2,[10]=3; 4} p(#t, t.x, t["y z"], t[10], t[4])
for i=1,3 do p(i) end for i=3,1,-1 do p(i) end for i=1,0 do p("never") end for i=0,1,0.25 do p(i) end
local i=0 while true do i=i+1 if i>5 then break end if i%2==0 then p("even",i) end end
repeat local z=i i=i-1 until z<3 p(i)
local function fact(n) if n<=1 then return 1 end return n*fact(n-1) end p(fact(20), fact(5))
local function fib(n) if n<2 then return n end return fib(n-1)+fib(n-2) end p(fib(15))
-- closures
local fs={} for i=1,3 do fs[i]=function() i=i+1 return i end end p(fs[1](),fs[1](),fs[2](),fs[3]())
local function counter() local n=0 return function() n=n+1 return n end, function() return n end end
local inc,get=counter() inc() inc() p(get())
local k=1 while k<3 do local j=k fs[k]=function() return j end k=k+1 end p(fs[1](),fs[2]())
-- shadow
local x=1 do local x=2 p(x) end p(x)
local function g(...) local a,b=... return select('#',...),a,b,... end p(g(1,nil,3)) p(g()) p((g(1,2)))
local function va(a,...) return a,{...} end local q,w=va(1,2,3) p(q,#w)
-- multiple assignment
local u,v=1,2 u,v=v,u p(u,v)
local tt={} local ii=1 ii,tt[ii]=ii+1,20 p(ii,tt[1],tt[2])
local m={1,2} m[1],m[2]=m[2],m[1] p(m[1],m[2])
local n1,n2,n3=1 p(n1,n2,n3)
-- methods
local obj={n=5} function obj:add(k,...) self.n=self.n+k return self,... end p(obj:add(3).n) p(select(2,obj:add(1,"z")))
-- metatables
local mt={__index=function(t,k) return k.."!" end,__newindex=function(t,k,v) rawset(t,k,v*2) end,__call=function(self,a,b) return a+b end,__tostring=function() return "TT" end,__add=function(a,b) return "add" end,__concat=function(a,b) return "cat" end,__eq=function() return true end,__lt=function() return true end,__le=function() return false end,__unm=function() return "neg" end}
local A,B=setmetatable({},mt),setmetatable({},mt)
p(A.foo, A(3,4), tostring(A), A+1, 1+A, A.."x", "x"..A, 1 ..A, A==B, A~=B, A<B, A<=B, A>B, -A) A.z=21 p(rawget(A,"z"))
local base={hello=function() return "hi" end} base.__index=base p(setmetatable({},base).hello())
p(getmetatable("").__index==string, getmetatable(setmetatable({},{__metatable="locked"})))
p(pcall(setmetatable,setmetatable({},{__metatable=1}),{}))
-- pcall
p(pcall(function() error("x",0) end)) p(pcall(function() return 1,2 end)) p(pcall(error)) p(select('#',pcall(error)))
p(xpcall(function() error("boom",0) end,function(e) return "H"..e end))
p(pcall(pcall,error,"e"))
-- strings
p(("hello"):upper(),("HeLLo"):lower(),#"abc",("abc"):reverse(),("ab"):rep(3),("hello"):sub(2,3),("hello"):sub(-3),("hello"):sub(0),("hello"):sub(10),("hello"):sub(2,-2),("x"):byte(),("abc"):byte(1,-1)) p(string.char(72,105))
p(("hello world"):find("wor"),("hello"):find("l"),("hello"):find("xyz"),("a.b"):find(".",1,true),("hello"):find("",10),("hello"):find("",3),("a+b"):find("+",1,true))
p(("hello"):find("l+"),("hello"):match("(h)(.)"),("key=val"):match("(%w+)=(%w+)"),("  trim "):match("^%s*(.-)%s*$"),("2024-01-02"):match("(%d+)-(%d+)-(%d+)"))
p(("hello"):gsub("l","L"),("hello"):gsub("l","L",1),("abc"):gsub("%w","%0%0"),("abc"):gsub("","-"),("hello world"):gsub("(%w+) (%w+)","%2 %1"),("abc"):gsub("b",{b="X"}),("abc"):gsub("%w",function(c) if c=="b" then return "Y" end end),("a%b"):gsub("%%","pct"))
for a,b in ("k1=v1,k2=v2"):gmatch("(%w+)=(%w+)") do p(a,b) end for w in ("one two"):gmatch("%a+") do p(w) end for s in ("abc"):gmatch("") do p("e") end for pos in ("abc"):gmatch("()b") do p(pos) end
p(("THE (quick) fox"):find("%((%a+)%)"),("f(a(b)c)d"):match("%b()"),("THE (quick) fox"):gsub("%f[%a]%a+","W"),("aaa"):match("a-b"),("aaab"):match("a-b"),("[x]"):match("[%]]"),("a-z"):match("[a%-z]+"),("]"):match("[]]"),("^"):match("[%^]"),("abc123"):match("[^%d]+"),("\0a"):match("%z"))
p(string.format("%5.2f|%d|%s|%q|%x|%g|%10s|%-5d|%c|%i|%e|%u|%o|%%|%+d|% d|%05d|%.3s|%5.1s|%X|%#x|%G|%E",3.14159,42,"hi","a\nb\"\0",255,0.1,"r",7,65,3.9,12345.678,7,8,5,5,42,"abcdef","xyz",255,255,1e-10,1.5))
p(string.format("%.0f %.10g %.14g %.3f %5s %-5s| %03d %.5d", 0.5, 0.1, 1/3, 2/3, "a","b",-5,42))
p(tonumber("10"),tonumber("0x10"),tonumber("  12  "),tonumber("1e2"),tonumber("abc"),tonumber(""),tonumber("10",2),tonumber("ff",16),tonumber("zz",36),tonumber("8",8),tonumber(nil),tonumber("1 2"),tonumber("0x"),tonumber("-0x10"), tonumber(".5"), tonumber("5."))
-- tables
local t={5,2,8,1} table.sort(t) p(table.concat(t,",")) table.sort(t,function(a,b) return a>b end) p(table.concat(t,","))
table.insert(t,9) table.insert(t,1,0) p(table.concat(t,","),table.remove(t),table.remove(t,1),table.concat(t,","),#t,table.getn(t),table.maxn({1,2,[10]=1}))
p(table.concat({}),table.concat({1},","),table.concat({1,2,3},"-",2,3),unpack({1,2,3})) p(unpack({1,2,3},2)) p(unpack({1,nil,3},1,3))
p(next({}),type(next),rawequal(t,t),rawget(t,1),#t, select(-1,1,2,3), select(2,1,2,3))
local ks={} for k,v in pairs({10,20,30}) do ks[#ks+1]=k..":"..v end p(table.concat(ks," ")) for i,v in ipairs({1,2,nil,4}) do p(i) end
-- math
p(math.floor(-1.5),math.ceil(1.2),math.max(1,5,3),math.min(2,0),math.abs(-3),math.sqrt(16),math.pi,math.huge,math.fmod(-5,3),math.modf(3.7),math.pow(2,8),math.exp(0),math.log(1),math.log10(1000),math.frexp(8),math.ldexp(1,4),math.sin(0),math.cos(0),math.rad(180),math.deg(math.pi))
math.randomseed(42) p(math.random(1000),math.random(1000))
-- numbers
p(1e15,1e14,123456789012,0.1,1/3,100,1e300*1e10,-1e300*1e10,2^53,2^63,3.0,1e-7,123.456e2)
-- bit
p(bit.band(0xff,0x0f),bit.bor(1,2,4),bit.bxor(5,1),bit.bnot(0),bit.lshift(1,31),bit.rshift(-1,28),bit.arshift(-256,4),bit.rol(1,33),bit.tohex(-1),bit.tobit(2^32+5),bit.bswap(1),bit.tohex(0xabcdef,6),bit.tohex(0xabcdef,-3))
-- json
p(cjson.encode({1,2,{a=1.5},"x\n/\"\1"}),cjson.encode({}),cjson.encode({[1]=1,[3]=3}),cjson.encode("é"),cjson.encode(12345678901234567),cjson.encode({a={b={}}}),cjson.encode(true),cjson.encode(cjson.null))
local d=cjson.decode('{"a":[1,2.5,-3e2,null,true,false],"b":{"c":"\\u00e9\\n\\ud83d\\ude00\\/"},"e":[],"f":{}}') p(d.a[1],d.a[2],d.a[3],d.a[4]==cjson.null,d.a[5],d.a[6],d.b.c,#d.e,next(d.f))
p(tostring(cjson.null),type(cjson.null))
-- msgpack
local pk=cmsgpack.pack({1,-1,127,128,255,256,65535,65536,-32,-33,-128,-129,-32768,-32769,2^31,2^32,2^53,-2^40,1.5,0.1,"abc",("x"):rep(40),("y"):rep(300),true,false,{a={b=1}},{}})
p(bit.tohex(#pk)) local hex={} for i=1,#pk do hex[#hex+1]=string.format("%02x",pk:byte(i)) end p(table.concat(hex))
local un=cmsgpack.unpack(pk) p(un[1],un[2],un[10],un[17],un[18],un[19],un[20],un[21],#un[23],un[26].a.b,#un) p(cmsgpack.unpack(cmsgpack.pack(1,"a",nil,true)))
p(tostring(loadstring("return 1+1")()), loadstring("x y"))
p([[long
string]], [==[a]]b]==], 'q\65\n\'', "a\
b") -- comment
--[[ block
comment ]] p(1) --[==[ x ]] ]==] p(2)
p(#"\0\1\2", ("a\0b"):len(), "a\0b"=="a\0b", 0xff, 1e2, .5, 3., 5e-1)
local s="" for i=1,100 do s=s..i.."," end p(#s,s:sub(-10))
local big={} for i=1,200 do big[i]=i*i end p(#big,big[200]) for i=200,101,-1 do big[i]=nil end p(#big)
local h={} for i=1,100 do h["k"..i]=i end local sum=0 for k,v in pairs(h) do sum=sum+v h[k]=nil end p(sum,next(h))
local e={n=0} for _,v in ipairs({3,1,2}) do e.n=e.n*10+v end p(e.n)
local function tail(n) if n==0 then return "done" end return tail(n-1) end p(tail(100000))
p((function(...) return select('#',...) end)(nil,nil)) p(type(nil),type(p),type({}),type("") ,type(2),type(true))
return r
